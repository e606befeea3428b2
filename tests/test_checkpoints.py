"""Finding a checkpoint: a folder, or a hub id through a stand-in for the hub."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from minilora import LLM, CheckpointError, ConfigError, SamplingParams
from minilora.engine import kv_pool
from minilora.engine.sampler import SamplingRow, draw
from minilora.lora.layers import LayerOptions


def test_a_hub_id_is_fetched(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(repo_id)
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        return str(tiny_llama)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    llm = LLM("somebody/tiny", num_kv_blocks=8)
    assert asked == ["somebody/tiny"]
    assert llm.generate("Hi", SamplingParams(max_tokens=2), progress=False)[0].token_ids


def test_a_hub_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        raise OSError("no\nnetwork")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"'somebody/tiny'.*no network"):
        LLM("somebody/tiny")


def test_without_huggingface_hub_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        LLM("somebody/tiny")


def test_kv_pool_of_a_cpu_follows_the_options(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_llama, max_num_seqs=3, max_model_len=100, device="cpu")
    assert llm.scheduler.pool.num_blocks == 3 * 7, "max_num_seqs x max_model_len"
    memory = types.SimpleNamespace(available=4 * 30 * 16 * 2 * 2 * 2 * 16 * 4)
    monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: memory)
    llm = LLM(tiny_llama, max_num_seqs=3, device="cpu")
    assert llm.scheduler.pool.num_blocks == 30, "a quarter of the free memory"
    assert llm.max_model_len == 480
    memory.available = 1000
    with pytest.raises(ConfigError, match=r"250 bytes are left.*or give num_kv_blocks"):
        LLM(tiny_llama, device="cpu")


def test_the_profile_for_a_gpus_kv_pool_samples(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and draws copy the logits of all requests; a pool without room for them fails."""
    llm = LLM(tiny_llama, max_num_seqs=5, num_kv_blocks=8, device="cpu")
    drawn: list[tuple[torch.Size, int]] = []

    def spy(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        drawn.append((logits.shape, len(draw(logits, rows).wait())))

    monkeypatch.setattr(kv_pool, "draw", spy)
    options = LayerOptions(torch.float32, torch.device("cpu"))
    kv_pool._profile(llm.config, llm.runner.model, 64, options)
    assert drawn == [((5, llm.model_config.vocab_size), 5)]


def test_a_kv_pool_larger_than_any_memory(tiny_llama: Path) -> None:
    for blocks in (1 << 28, 1 << 30):
        with pytest.raises(ConfigError, match=rf"num_kv_blocks={blocks}, which take \d+ MiB; give"):
            LLM(tiny_llama, num_kv_blocks=blocks, block_size=1024, device="cpu")


def test_adapter_slots_larger_than_memory(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = LayerOptions.zeros

    def full(self: LayerOptions, *shape: int) -> torch.Tensor:
        if self.max_loras:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return zeros(self, *shape)

    monkeypatch.setattr(LayerOptions, "zeros", full)
    with pytest.raises(ConfigError, match=r"no memory for.*max_loras=7 .*max_lora_rank=16; lower"):
        LLM(tiny_llama, enable_lora=True, max_loras=7, device="cpu", num_kv_blocks=8)


def test_max_model_len_that_cannot_be_held(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=100 does not fit.*= 48 tokens"):
        LLM(tiny_llama, max_model_len=100, num_kv_blocks=3)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        LLM(tiny_llama, max_model_len=1 << 20)


def test_unknown_keyword_names_the_nearest(tiny_llama: Path) -> None:
    with pytest.raises(TypeError, match="'max_lora'; did you mean 'max_loras'"):
        LLM(tiny_llama, max_lora=3)


def test_the_only_cpu_has_a_number_too(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="cpu:0", num_kv_blocks=8)
    assert llm.kv_cache.tensor.device == torch.device("cpu")


def test_device_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="device='tpu'"):
        LLM(tiny_llama, device="tpu")
