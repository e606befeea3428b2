"""pytest-benchmark runs of the LoRA ops: ``pytest tests/benchmarks``.

On a GPU each call is a graph of 16 shrinks and expands at Llama-3.1-8B's shape, on a CPU one
call of the plain bodies at SmolLM2's. The tables in `docs/` come from `bench_kernels.py`, which
times such graphs with CUDA events.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from minilora.bench.lora_case import METHODS, SHAPES, Case
from minilora.ops.triton import HAS_TRITON
from minilora.testing.workloads import workload

GPU = torch.cuda.is_available() and HAS_TRITON


def case_of(name: str) -> Case:
    slots = workload(name, 8, 4)
    if GPU:
        width, outs = SHAPES["llama-3.1-8b"]["qkv"]
        return Case(width, outs, slots, dtype=torch.bfloat16, device="cuda", sets=16)
    return Case(*SHAPES["smollm2"]["qkv"], slots, rank=8)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["identical", "distinct", "zipf", "skewed", "base_mixed"])
def test_decode(timer, name: str, method: str) -> None:
    if method == "atomic" and not GPU:
        pytest.skip("atomic adds need a GPU")
    case = case_of(name)
    call = getattr(case, method)
    call(0)
    if GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(case.sets):
                call(i)
        call = graph.replay
    timer.extra_info["calls"] = case.sets
    timer.pedantic(call, rounds=50, iterations=1, warmup_rounds=3)
