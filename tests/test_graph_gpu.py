"""What only a GPU can show: compilations after warm-up, and profiles of real replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import GraphMode
from minilora.model.fused import num_compilations
from minilora.testing.invariants import is_lora_launch
from tests.conftest import SignatureZoo

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
import triton
import triton.language as tl

pytestmark = pytest.mark.gpu


@triton.jit
def _add_one(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The names of Triton kernels that are specialised from now on, from a disk cache or not."""
    from triton import knobs

    seen: list[str] = []
    before = knobs.runtime.jit_cache_hook

    def note(*, fn: Any, **_: Any) -> None:
        seen.append(fn.name.rpartition(".")[2])

    knobs.runtime.jit_cache_hook = note
    yield seen
    knobs.runtime.jit_cache_hook = before


@pytest.mark.parametrize(
    ("graph", "compile_"), [("cuda", "none"), ("none", "none"), ("cuda", "inductor")]
)
def test_p4_no_request_compiles_or_captures(
    tiny_llama: Path,
    tiny_adapter: Callable[..., Path],
    compilations: list[str],
    graph: str,
    compile_: str,
) -> None:
    """vLLM 8559, 43009, 49903: the first request of a kind took seconds."""
    llm = LLM(
        tiny_llama, enable_lora=True, max_loras=3, max_lora_rank=16, max_num_seqs=20,
        max_num_batched_tokens=700, max_model_len=512, num_kv_blocks=600, dtype="bfloat16",
        capture_sizes=[1, 2, 8, 20, 64], graph=graph, compile=compile_,
    )  # fmt: skip
    captured, compiled = len(llm.runner.graphs), num_compilations()
    compilations.clear()
    loras = [
        LoRARequest(f"r{r}", tiny_adapter(f"p4-{r}", r=r, target_modules="all-linear"))
        for r in (4, 16)
    ] + [LoRARequest("e", tiny_adapter("p4-e", target_modules=["embed_tokens", "lm_head"], r=8))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for rows in (1, 2, 3, 16, 17, 20):
        for length in (1, 5, 40, 300):
            for chosen in ([None], loras[:1], loras[:2], loras, [None, *loras]):
                picked = [chosen[row % len(chosen)] for row in range(rows)]
                llm.generate([[7] * length] * rows, params, picked, progress=False)
    assert compilations == []
    assert num_compilations() == compiled
    _add_one[(1,)](torch.zeros(1, device="cuda"))
    assert compilations == ["_add_one"], "the hook does see what is new"
    assert len(llm.runner.graphs) == captured
    if graph == "cuda":
        assert min(llm.runner.num_steps[mode] for mode in GraphMode) > 0, "also steps too long"


def test_p1_base_traffic_launches_no_lora_kernel(zoo: SignatureZoo) -> None:
    """vLLM 10898: an engine with adapters, asked for the base model, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    llm = LLM(zoo.model, enable_lora=True, num_kv_blocks=32, max_model_len=64, device="cuda")
    lora = LoRARequest("a", zoo("down-7"))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    launches = {}
    for name, chosen in (("adapter", lora), ("base", None)):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            llm.generate([[4]] * 8, params, chosen, progress=False)
        launches[name] = [e.name for e in profiler.events() or () if is_lora_launch(e.name)]
    assert launches["adapter"]
    assert launches["base"] == []
