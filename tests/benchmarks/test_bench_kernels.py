"""pytest-benchmark runs of the LoRA kernels: ``pytest tests/benchmarks`` on a machine with a GPU.

Each call is a graph of 16 shrinks and expands (see `minilora.ops.triton.bench`); the tables in
`docs/` come from `bench_kernels.py`, which times such graphs with CUDA events.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DECODE = {"identical": (8, 1), "uniform": (8, 4), "single": (1, 1), "wide": (32, 4)}


@pytest.mark.parametrize("method", ["ours", "atomic", "gather_einsum", "adapter_loop"])
@pytest.mark.parametrize("name", DECODE)
def test_decode(timer, name: str, method: str) -> None:
    from minilora.ops.triton.bench import Workload

    rows, adapters = DECODE[name]
    work = Workload("qkv", rows, adapters)
    call = getattr(work, method)
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(work.sets):
            call(i)
    timer.extra_info["calls"] = work.sets
    timer(graph.replay)
