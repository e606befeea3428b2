"""Benchmarks: a timer that waits for the GPU, so that a launch does not pass for its work."""

from __future__ import annotations

import time

import pytest
import torch


def synchronised() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@pytest.fixture
def timer(benchmark):
    """pytest-benchmark's fixture, with the synchronising timer."""
    benchmark._timer = synchronised
    return benchmark
