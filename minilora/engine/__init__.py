"""Many steps: requests, scheduling, sampling and text around one `ModelRunner`."""
