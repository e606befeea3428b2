"""Adapter folders written by hand, for the tests of `minilora.lora.adapter`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minilora.config import AdapterError, ModelConfig
from minilora.lora.adapter import Adapter, load_adapter

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
PREFIX = "base_model.model."


def lora(*modules: str, r: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return random A and B of some modules under PEFT's names."""
    tensors = {}
    for seed, module in enumerate(modules):
        inputs, outputs = MODEL.lora_modules()[module]
        key_a, key_b = keys(module)
        generator = torch.Generator().manual_seed(seed)
        tensors[key_a] = torch.randn(r, inputs, generator=generator).to(dtype)
        tensors[key_b] = torch.randn(outputs, r, generator=generator).to(dtype)
    return tensors


def keys(module: str) -> tuple[str, str]:
    """Return the names that PEFT gives A and B of a module."""
    embedding = module == EMBEDDING
    middle, end = ("lora_embedding_", "") if embedding else ("lora_", ".weight")
    return f"{PREFIX}{module}.{middle}A{end}", f"{PREFIX}{module}.{middle}B{end}"


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    file_format: str = "safetensors",
    without: tuple[str, ...] = (),
    **fields: Any,
) -> Path:
    """Write an adapter of q_proj and v_proj, or of `tensors`; `fields` go into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": None, **fields}
    config = {key: value for key, value in config.items() if key not in without}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = lora(Q, V) if tensors is None else tensors
    if file_format == "bin":
        torch.save(dict(tensors), folder / "adapter_model.bin")
    else:
        save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def load(folder: Path, **options: Any) -> Adapter:
    """Load a folder as the adapter "sql", with ranks up to 16."""
    return load_adapter("sql", folder, MODEL, **{"max_lora_rank": 16, **options})


def refusal(folder: Path, file: str = "", **options: Any) -> str:
    """Load a folder that is refused; return the message, which must name adapter and file."""
    with pytest.raises(AdapterError) as error:
        load(folder, **options)
    text = str(error.value)
    assert text.startswith("adapter 'sql': ")
    assert str(folder / file) in text
    assert "\n" not in text
    return text
