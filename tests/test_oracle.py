"""The oracle against transformers and PEFT, in float64 to the last digits, and its tolerances."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minilora import AdapterError, CheckpointError, ConfigError, RequestError
from minilora.config import ModelConfig
from minilora.config.model import LAYER_MODULES
from minilora.lora.adapter import Adapter, LoraWeights, load_adapter
from minilora.testing import Oracle, make_signature_llama, make_tiny_adapter, make_tiny_llama
from minilora.testing.tolerances import LOGIT_TOLERANCE, assert_close, relative_error
from tests.reference import PeftReference

# Both sides in float64: nothing but the order of additions differs.
EXACT = 1e-12
EVERY = [*LAYER_MODULES, "embed_tokens", "lm_head"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one KV head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "three query heads a KV head": {"hidden_size": 48, "num_attention_heads": 6},
    "head_dim 32": {"head_dim": 32},
    "head_dim null": {"extra_config": {"head_dim": None}},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "Mistral": {"architecture": "MistralForCausalLM"},
    "theta": {"rope_theta": 500000.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "llama3 rope, new names": {"rope_scaling": LLAMA3, "rope_spelling": "rope_parameters"},
    "large eps": {"rms_norm_eps": 1e-2},
    "five layers, sharded": {"num_hidden_layers": 5, "shards": 4},
    "bfloat16 on disk": {"dtype": "bfloat16"},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    **{f"only {module}": {"target_modules": [module], "r": 5} for module in EVERY},
    "all layers": {},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "every": {"target_modules": EVERY},
    "rank 1": {"target_modules": EVERY, "r": 1},
    "rank 64": {"target_modules": EVERY, "r": 64},
    "rslora": {"r": 16, "use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 17},
        "alpha_pattern": {"q_proj": 5, "layers.0.self_attn.v_proj": 40},
    },
    "patterns with rslora": {
        "rank_pattern": {"up_proj": 3},
        "alpha_pattern": {"up_proj": 5},
        "use_rslora": True,
        "lora_alpha": 4,
    },
    "one layer": {"layers_to_transform": [1]},
    "excluding": {"exclude_modules": ["up_proj"]},
    "regex": {"target_modules": r".*\.(q_proj|down_proj)"},
    "bin": {"target_modules": ["v_proj"], "file_format": "bin"},
    "bfloat16": {"dtype": "bfloat16"},
}


def prompt(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * length + salt)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float64
    assert actual.shape == expected.shape
    assert relative_error(actual, expected).max() < EXACT


class Model:
    """One checkpoint, its float64 reference and its oracle."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = make_tiny_llama(folder / "model", **options)
        self.reference = PeftReference(self.folder, torch.float64)
        self.oracle = Oracle(self.folder)

    def adapter(self, name: str) -> Path:
        folder = self.folder.parent / name
        if not folder.exists():
            make_tiny_adapter(folder, self.folder, **ADAPTERS[name])
        return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, name: str) -> None:
    model = Model(tmp_path, **MODELS[name])
    for folder in (None, model.adapter("every")):
        tokens = prompt(300)
        assert_exact(model.oracle.logits(tokens, folder), model.reference.logits(tokens, folder))


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(plain: Model, tied: Model, name: str) -> None:
    for model in (plain, tied):
        folder, tokens = model.adapter(name), prompt(50)
        expected = model.reference.logits(tokens, folder)
        assert_exact(model.oracle.logits(tokens, folder), expected)
        base = model.oracle.logits(tokens)
        assert relative_error(base, expected).max() > 0.05, "the adapter changes the logits"


@pytest.mark.parametrize("name", ["all layers", "every", "rslora"])
def test_greedy_tokens(plain: Model, tied: Model, name: str) -> None:
    for model in (plain, tied):
        for length in (1, 2, 33):
            folder, tokens = model.adapter(name), prompt(length)
            expected = model.reference.greedy(tokens, 24, folder)
            assert model.oracle.greedy(tokens, 24, folder) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_transformers_as_it_is(plain: Model, dtype: torch.dtype) -> None:
    """Unchanged transformers in float32 is within the tolerance, and far from it."""
    reference, oracle = PeftReference(plain.folder), Oracle(plain.folder, dtype)
    for name in ("every", "rslora"):
        for length in (1, 60):
            tokens, folder = prompt(length), plain.adapter(name)
            actual, expected = reference.logits(tokens, folder), oracle.logits(tokens, folder)
            assert expected.dtype == dtype
            assert_close(actual, expected, torch.float32)
            assert relative_error(actual, expected).max() < 1e-5


def test_an_adapter_on_a_tied_embedding_stays_out_of_the_head(tied: Model) -> None:
    """The head of a tied model with the embedding changed too would give other logits."""
    folder, tokens = tied.adapter("only embed_tokens"), prompt(20)
    merged = dict(tied.oracle._merge(folder))
    base = tied.oracle._weights["model.embed_tokens.weight"]
    assert not torch.equal(merged["model.embed_tokens.weight"], base)
    assert torch.equal(merged["lm_head.weight"], base)
    merged["lm_head.weight"] = merged["model.embed_tokens.weight"]
    leaked = tied.oracle._forward(tokens, merged)
    assert relative_error(leaked, tied.reference.logits(tokens, folder)).max() > 0.05


def test_an_adapter_object_is_as_good_as_its_folder(plain: Model) -> None:
    folder, tokens = plain.adapter("patterns"), prompt(9)
    adapter = load_adapter("x", folder, plain.oracle.config, max_lora_rank=64)
    by_object = plain.oracle.logits(tokens, adapter)
    assert torch.equal(by_object, plain.oracle.logits(tokens, folder))
    assert torch.equal(by_object, plain.oracle.logits(tokens, str(folder)))
    assert torch.equal(plain.oracle.logits(tokens), Oracle(plain.folder).logits(tokens))


def test_the_scaling_is_the_adapters_own(plain: Model) -> None:
    """Nothing is folded: with A, B and s made by hand, W + s·B·A is what is computed."""
    name, generator = "model.layers.0.mlp.up_proj", torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 64, generator=generator), torch.randn(172, 3, generator=generator)
    adapter = Adapter("x", "", {name: LoraWeights(a, b, 3, 99.0, 0.25)}, "")
    change = (
        plain.oracle._merge(adapter)[f"{name}.weight"] - plain.oracle._weights[f"{name}.weight"]
    )
    assert torch.allclose(change, 0.25 * (b.double() @ a.double()), rtol=0, atol=1e-14)


def test_greedy_ends(plain: Model) -> None:
    answer = plain.oracle.greedy([3, 4], 12)
    assert len(answer) == 12
    end = answer[5]
    assert plain.oracle.greedy([3, 4], 12, eos=[end]) == answer[: answer.index(end) + 1]
    assert plain.oracle.greedy([3, 4], 0) == []


def test_greedy_takes_the_lowest_id_of_a_tie(tmp_path: Path) -> None:
    folder = make_signature_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][20] = weights["lm_head.weight"][5]  # after 4, both have the same
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert Oracle(folder).greedy([4], 1) == [5]


@pytest.mark.parametrize("tokens", [[], [1, 256], [-1]])
def test_tokens_that_do_not_exist(plain: Model, tokens: list[int]) -> None:
    with pytest.raises(RequestError, match="from 0 to 255"):
        plain.oracle.logits(tokens)


def test_half_precision_is_refused(plain: Model) -> None:
    with pytest.raises(ConfigError, match="bfloat16 must be"):
        Oracle(plain.folder, torch.bfloat16)


def test_an_adapter_of_another_model_is_refused(plain: Model, tied: Model, tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        plain.oracle.logits([3], tmp_path)
    wide = make_tiny_llama(tmp_path / "wide", hidden_size=96)
    with pytest.raises(AdapterError):
        Oracle(wide).logits([3], plain.adapter("every"))


def test_damaged_checkpoints(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, shards=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.2"):
        Oracle(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002\.safetensors is missing"):
        Oracle(folder)


def test_a_tied_head_wins_over_one_in_the_file(tied: Model, tmp_path: Path) -> None:
    """Field report M3 (b): the flag decides, as in transformers."""
    folder = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.ones(256, 64)}, file, {"format": "pt"})
    assert torch.equal(Oracle(folder).logits([3, 4]), tied.oracle.logits([3, 4]))


def test_every_module_left_out_is_beyond_float32_by_far(plain: Model) -> None:
    """The tolerance tells faults from rounding: each module of each layer counts."""
    config = ModelConfig.from_folder(plain.folder)
    adapter = plain.oracle._load(plain.adapter("every"))
    assert adapter.modules.keys() == config.lora_modules().keys()
    expected = plain.oracle.logits(prompt(24), adapter)
    for left_out in adapter.modules:
        others = {name: lora for name, lora in adapter.modules.items() if name != left_out}
        actual = plain.oracle.logits(prompt(24), dataclasses.replace(adapter, modules=others))
        error = relative_error(actual, expected)
        assert error.max() > 100 * LOGIT_TOLERANCE[torch.float32], left_out
        with pytest.raises(AssertionError):
            assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_within_its_tolerance(
    tmp_path: Path, plain: Model, dtype: torch.dtype
) -> None:
    reference = PeftReference(plain.folder, dtype)
    for name in (None, "every", "rank 1", "rslora"):
        folder = plain.adapter(name) if name else None
        for length in (1, 60):
            actual = reference.logits(prompt(length), folder)
            expected = plain.oracle.logits(prompt(length), folder)
            assert_close(actual, expected, dtype, what=f"{name} after {length} tokens")
    other = plain.oracle.logits(prompt(60), plain.adapter("rank 64"))
    with pytest.raises(AssertionError):
        assert_close(actual, other, dtype)


def test_assert_close_names_the_worst_element() -> None:
    expected = torch.linspace(-4, 6, 20).repeat(3, 1)  # a range of 10
    actual = expected.clone()
    actual[1, 7] += 10 * 0.9e-4
    assert_close(actual, expected, torch.float32)
    actual[2, 5] += 10 * 2e-2
    with pytest.raises(
        AssertionError,
        match=r"x: 1 of 3 rows are off by more than 0\.0001 .*row 2, element 5.*0\.02 of the range",
    ):
        assert_close(actual, expected, torch.float32, what="x")
    assert_close(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_assert_close_fails_for_what_is_not_finite(value: float) -> None:
    expected = torch.linspace(-4, 6, 20).repeat(3, 1)
    actual = expected.clone()
    actual[1, 3] = value
    with pytest.raises(AssertionError, match="row 1, element 3"):
        assert_close(actual, expected, torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_close(expected, actual, torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_close(actual, actual, torch.bfloat16)


def test_assert_close_fails_for_another_shape_and_takes_none() -> None:
    with pytest.raises(AssertionError, match=r"shape \[2, 3\], expected \[3\]"):
        assert_close(torch.zeros(2, 3), torch.zeros(3), torch.float32)
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), torch.float32)
    assert_close(torch.ones(2, 3), torch.ones(2, 3), torch.float32)  # a range of zero
    with pytest.raises(AssertionError):
        assert_close(torch.ones(2, 3) + 1e-6, torch.ones(2, 3), torch.float32)
