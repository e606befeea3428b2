"""Token for token what transformers + PEFT compute, alone and in mixed batches.

A reference forward over prompt + answer gives the reference's logits at every generated token.
If each of our tokens is the reference's argmax after the same prefix, the greedy answers are
equal token for token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.engine.request import Request
from minilora.testing import make_tiny_adapter, make_tiny_llama
from minilora.testing.tolerances import assert_close
from tests.reference import PeftReference

LAYER_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EVERY = [*LAYER_MODULES, "embed_tokens", "lm_head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    **{f"only-{module}": {"target_modules": [module]} for module in EVERY},
    "all-layers": {"target_modules": LAYER_MODULES},
    "everything": {"target_modules": EVERY},
    **{  # alpha follows r: a scale of 16 would make float32 itself, also the reference's, too rough
        f"rank-{r}": {"target_modules": LAYER_MODULES, "r": r, "lora_alpha": 2 * r}
        for r in (1, 2, 3, 12, 16, 33, 64)
    },
    "rslora": {"target_modules": LAYER_MODULES, "r": 16, "lora_alpha": 16, "use_rslora": True},
    "not-rslora": {"target_modules": LAYER_MODULES, "r": 16, "lora_alpha": 16},
    "rank-pattern": {
        "target_modules": LAYER_MODULES,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 17},
        "alpha_pattern": {"q_proj": 5, "layers.0.self_attn.v_proj": 40},
    },
    "one-layer": {"target_modules": LAYER_MODULES, "layers_to_transform": [1]},
    "excluding": {"target_modules": LAYER_MODULES, "exclude_modules": ["up_proj", "k_proj"]},
    "regex": {"target_modules": r".*\.(q_proj|down_proj)"},
    "all-linear": {"target_modules": "all-linear"},
    "bin": {"target_modules": ["v_proj"], "file_format": "bin"},
}
LENGTHS = [1, 2, 15, 16, 17, 33, 100, 300]


class LogitsLLM(LLM):
    """Keeps the logits that each answer's tokens were sampled from."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: dict[str, list[torch.Tensor]] = {}
        run, execute = self.runner.execute, self.core.execute

        def keeping(batch: Any) -> torch.Tensor:
            self.last = run(batch)
            return self.last

        def execute_and_keep(step: Any) -> Any:
            sampled = execute(step)
            for request, row in zip(step.sampling, self.last, strict=True):
                self._keep(request, row)
            return sampled

        self.runner.execute = keeping  # type: ignore[method-assign]
        self.core.execute = execute_and_keep  # type: ignore[method-assign]

    def _keep(self, request: Request, row: torch.Tensor) -> None:
        self.kept.setdefault(request.request_id, []).append(row.clone())


def prompt(length: int, salt: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + salt)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


def check(
    llm: LogitsLLM,
    reference: PeftReference,
    prompts: list[list[int]],
    folders: list[Path | None],
    max_tokens: int = 64,
) -> None:
    """Serve all prompts in one call and compare every token and every logit."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    loras = [None if folder is None else LoRARequest(folder.name, folder) for folder in folders]
    outputs = llm.generate(prompts, params, loras)
    for output, folder in zip(outputs, folders, strict=True):
        what = f"{output.adapter} after {len(output.prompt_token_ids)} tokens"
        assert output.error is None
        assert len(output.token_ids) == max_tokens
        sequence = [*output.prompt_token_ids, *output.token_ids[:-1]]
        want = reference.logits(sequence, folder)[-max_tokens:].float()
        got = torch.stack(llm.kept[output.request_id]).cpu()
        assert_close(got, want, torch.float32, what=what)
        assert output.token_ids == want.argmax(-1).tolist(), what


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PeftReference:
    return PeftReference(tiny_llama)


def make_llm(model: Path, device: str, **options: Any) -> LogitsLLM:
    defaults: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 64,
        "num_kv_blocks": 400,
        "dtype": "float32",
        "device": device,
    }
    return LogitsLLM(model, **{**defaults, **options})


@pytest.fixture(scope="module", params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def shared_llm(request: Any, tiny_llama: Path) -> LogitsLLM:
    return make_llm(tiny_llama, request.param, max_loras=2)


@pytest.mark.parametrize("name", ADAPTERS)
def test_alone(
    shared_llm: LogitsLLM,
    reference: PeftReference,
    tiny_adapter: Callable[..., Path],
    name: str,
) -> None:
    folder = tiny_adapter(name, seed=len(name), **ADAPTERS[name])
    length = LENGTHS[list(ADAPTERS).index(name) % len(LENGTHS)]
    check(shared_llm, reference, [prompt(length, 1)], [folder])


@pytest.mark.parametrize("length", LENGTHS)
def test_base_alone(shared_llm: LogitsLLM, reference: PeftReference, length: int) -> None:
    check(shared_llm, reference, [prompt(length, 2)], [None])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 48},  # the longest request needs 23: many are preempted
        {"max_num_batched_tokens": 40, "max_num_seqs": 7},  # prompts in chunks
        {"max_loras": 1},
        {"max_loras": 3, "num_kv_blocks": 60, "block_size": 7, "max_num_batched_tokens": 64},
        {"specialize_lora": False, "specialize_active_lora": False},
    ],
    ids=["large", "preempting", "chunked", "one-slot", "all-small", "unspecialized"],
)
def test_in_one_batch(
    tiny_llama: Path,
    reference: PeftReference,
    tiny_adapter: Callable[..., Path],
    options: dict[str, Any],
    device: str,
) -> None:
    folders: list[Path | None] = [None, None]
    for name, config in ADAPTERS.items():
        folders.append(tiny_adapter(name, seed=len(name), **config))
        if len(folders) % 6 == 0:
            folders.append(None)
    prompts = [prompt(LENGTHS[i % len(LENGTHS)], i) for i in range(len(folders))]
    llm = make_llm(tiny_llama, device, **options)
    check(llm, reference, prompts, folders)
    if "num_kv_blocks" in options:
        assert llm.scheduler.num_preemptions > 0
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.num_blocks


MODELS: dict[str, dict[str, Any]] = {
    "twelve-layers": {"num_hidden_layers": 12},
    "explicit-head-dim": {"head_dim": 32},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-grouping": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architecture": "MistralForCausalLM"},
    "sharded": {"shards": 3},
}


@pytest.mark.parametrize("name", MODELS)
def test_model_features(tmp_path: Path, name: str, device: str) -> None:
    model = make_tiny_llama(tmp_path / "model", **MODELS[name])
    folders: list[Path | None] = [None]
    for adapter in ("all-layers", "everything", "only-o_proj", "rank-pattern"):
        make_tiny_adapter(tmp_path / adapter, model, **ADAPTERS[adapter])
        folders.append(tmp_path / adapter)
    prompts = [prompt(5 + 13 * i, i) for i in range(len(folders))]
    llm = make_llm(model, device, max_loras=3)
    check(llm, PeftReference(model), prompts, folders, max_tokens=32)


def test_g9_no_drift_over_400_tokens(
    tiny_llama: Path, reference: PeftReference, tiny_adapter: Callable[..., Path], device: str
) -> None:
    folder = tiny_adapter("all-layers", seed=len("all-layers"), **ADAPTERS["all-layers"])
    llm = make_llm(tiny_llama, device)
    check(llm, reference, [prompt(9, 1), prompt(9, 2)], [folder, None], max_tokens=400)


def test_g2_every_batch_size_with_a_nearly_full_pool(
    tiny_llama: Path, reference: PeftReference, device: str
) -> None:
    """Same prompts in one batch answer the same, also when the last block is in use."""
    for size in range(1, 18):
        llm = make_llm(tiny_llama, device, num_kv_blocks=size * 2 + 3, block_size=8)
        check(llm, reference, [prompt(4, 0)] * size, [None] * size, max_tokens=12)
