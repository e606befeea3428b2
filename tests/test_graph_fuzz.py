"""Ten thousand random steps from graphs, and not one wrong token."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from minilora import LLM
from minilora.batch import GraphMode
from minilora.ops.kernel_meta import KernelMeta
from minilora.testing.fuzz import fuzz
from tests.conftest import SignatureZoo
from tests.test_broken_graphs import count_no_lora_as_a_group

STEPS = int(os.environ.get("MINILORA_FUZZ_STEPS", "10000"))
BACKENDS = ["recorded", *(["cuda"] if torch.cuda.is_available() else [])]
SIGNS = ["down-1", "down-7", "down-9", "v-2", "v-5", "v-11"]


def make(zoo: SignatureZoo, graph: str, **options: Any) -> LLM:
    return LLM(
        zoo.model, graph=graph, device="cuda" if graph == "cuda" else "cpu", enable_lora=True,
        max_loras=3, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=64,
        num_kv_blocks=24, block_size=8, **options,
    )  # fmt: skip


def signs(zoo: SignatureZoo) -> dict[str, tuple[str, int]]:
    return {name: (zoo(name), int(name.split("-")[1])) for name in SIGNS}


@pytest.mark.slow
@pytest.mark.parametrize("graph", BACKENDS)
def test_no_wrong_token(zoo: SignatureZoo, graph: str) -> None:
    llm = make(zoo, graph)
    report = fuzz(llm, signs(zoo), STEPS)
    assert report.wrong == []
    assert report.steps >= STEPS
    assert report.answers > STEPS // 10
    replayed = llm.runner.num_steps
    assert min(replayed[GraphMode.FULL], replayed[GraphMode.PIECEWISE]) > STEPS // 10
    assert replayed[GraphMode.NONE] == 0


@pytest.mark.parametrize("graph", BACKENDS)
def test_no_wrong_token_ahead(zoo: SignatureZoo, graph: str) -> None:
    llm = make(zoo, graph, async_scheduling=True)
    assert fuzz(llm, signs(zoo), 1000).wrong == []
    assert llm.core.ahead is not None
    assert llm.core.ahead.num_ahead > 100


@pytest.mark.parametrize("graph", BACKENDS)
def test_the_fuzz_finds_a_dropped_adapter(zoo: SignatureZoo, graph: str, monkeypatch: Any) -> None:
    """vLLM 0.24's fault: -1 is a group in the metadata, but not in the key."""
    llm = make(zoo, graph)
    monkeypatch.setattr(KernelMeta, "write", count_no_lora_as_a_group)
    assert fuzz(llm, signs(zoo), 150).wrong
