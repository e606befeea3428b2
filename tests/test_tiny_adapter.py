"""The made adapters: the files that PEFT writes, and that PEFT reads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from minilora import AdapterError, ConfigError
from minilora.config.model import LAYER_MODULES
from minilora.testing import make_tiny_adapter, make_tiny_llama
from tests.reference import PeftReference

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|tied layer|is_gradient_checkpointing)"
)
FILE = "adapter_model.safetensors"
EVERY = [*LAYER_MODULES, "embed_tokens", "lm_head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every": {"target_modules": EVERY},
    "one full name": {"target_modules": ["model.layers.1.mlp.up_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.1.*\.(q_proj|down_proj)"},
    "regex on embeddings": {"target_modules": r".*\.(embed_.*|q_proj)|lm_.*"},
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "embedding by full name": {"target_modules": ["model.embed_tokens"]},
    "patterns": {
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 17, r".*\.mlp\..*": 5},
        "alpha_pattern": {"q_proj": 5, "layers.0.self_attn.v_proj": 40},
    },
    "rslora": {"r": 16, "use_rslora": True},
    "one layer": {"layers_to_transform": [1], "target_modules": ["v_proj", "lm_head"]},
    "a layer as a number": {"layers_to_transform": 0},
    "layers and full names": {
        "layers_to_transform": [1],
        "target_modules": ["model.layers.0.mlp.up_proj", "v_proj"],
    },
    "excluding": {"exclude_modules": ["up_proj", "model.layers.0.self_attn.k_proj"]},
    "excluding by regex": {"exclude_modules": r".*self_attn.*"},
    "bin": {"target_modules": ["v_proj"], "file_format": "bin"},
    "bfloat16": {"dtype": "bfloat16"},
}
NOT_PEFT = ("file_format", "dtype", "scale", "seed")


def prompt(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * length + salt)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": make_tiny_llama(root / "plain"),
        "tied": make_tiny_llama(root / "tied", tie_word_embeddings=True, head_dim=32),
    }


def load_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    file = folder / "adapter_model.bin"
    tensors = torch.load(file) if file.exists() else load_file(file.with_suffix(".safetensors"))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("model", ["plain", "tied"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_file_has_the_tensors_that_peft_writes(
    tmp_path: Path, models: dict[str, Path], model: str, name: str
) -> None:
    options = ADAPTERS[name]
    ours = make_tiny_adapter(tmp_path / "ours", models[model], **options)
    lora = {"lora_alpha": 16, "target_modules": [*LAYER_MODULES], **options}
    config = peft.LoraConfig(**{k: v for k, v in lora.items() if k not in NOT_PEFT})
    peft.get_peft_model(load_base(models[model]), config).save_pretrained(tmp_path / "theirs")
    assert shapes(ours) == shapes(tmp_path / "theirs")


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_loads_all_of_it(tmp_path: Path, models: dict[str, Path], name: str) -> None:
    folder = make_tiny_adapter(tmp_path, models["plain"], **ADAPTERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT's, for keys that are missing
        loaded = peft.PeftModel.from_pretrained(load_base(models["plain"]), folder)
        found = loaded.load_adapter(folder, "again")
    assert not found.unexpected_keys
    assert not [key for key in found.missing_keys if "lora" in key and "again" in key]
    config = loaded.peft_config["default"]
    for key, value in ADAPTERS[name].items():
        if key not in NOT_PEFT and key != "target_modules":
            got = getattr(config, key)
            assert (set(got) if isinstance(got, set) else got) == (
                set(value) if isinstance(got, set) else value
            )


def test_tensors_do_not_depend_on_how_they_are_scaled_or_named(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """Field reports L1 and L10 compare adapters that differ in the config alone."""
    names = list(LAYER_MODULES)
    variants: list[dict[str, Any]] = [
        {"target_modules": names},
        {"target_modules": "all-linear"},
        {"target_modules": rf".*\.({'|'.join(names)})"},
        {"use_rslora": True, "lora_alpha": 3, "alpha_pattern": {"q_proj": 1}},
    ]
    first, *others = (
        load_file(make_tiny_adapter(tmp_path / str(i), models["plain"], r=16, **v) / FILE)
        for i, v in enumerate(variants)
    )
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_every_module_changes_greedy_answers(
    tmp_path: Path, models: dict[str, Path], rank: int
) -> None:
    model = PeftReference(models["plain"])
    prompts = [prompt(length) for length in (1, 9, 60)]
    base = [model.greedy(tokens, 24) for tokens in prompts]
    for module in EVERY:
        folder = make_tiny_adapter(
            tmp_path / module, models["plain"], target_modules=[module], r=rank
        )
        answers = [model.greedy(tokens, 24, folder) for tokens in prompts]
        assert all(a != b for a, b in zip(answers, base, strict=True)), module


def test_base_layer_copies_can_be_left_out(tmp_path: Path, models: dict[str, Path]) -> None:
    options: dict[str, Any] = {"target_modules": EVERY, "save_embedding_layers": False}
    folder = make_tiny_adapter(tmp_path, models["plain"], **options)
    assert not any("base_layer" in name for name in shapes(folder))


def test_an_adapter_for_no_module_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    with pytest.raises(AdapterError, match="'gate'"):
        make_tiny_adapter(tmp_path, models["plain"], target_modules=["gate"])
    with pytest.raises(ConfigError, match="lora_alpha"):
        make_tiny_adapter(tmp_path, models["plain"], alpha=3)
