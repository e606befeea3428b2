"""Measurements of a whole engine: latency, throughput, serving, and what adapters cost."""
