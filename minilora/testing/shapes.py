"""Shapes of well-known Llamas, for benchmarks on random weights.

Widths and counts are those of the published `config.json` files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minilora.config.errors import ConfigError, known_names
from minilora.config.model import LAYER_MODULES, ModelConfig
from minilora.testing.tiny_adapter import lora_config, lora_tensors, write_adapter

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


def make_shape(folder: str | Path, name: str, **changes: Any) -> Path:
    """Write the `config.json` of a shape, to be run with ``load_format="dummy"``.

    Args:
        folder: to write to.
        name: of `SHAPES`.
        **changes: fields of config.json to be other than the shape's.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known; known: {known_names(SHAPES)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(
        json.dumps(config | {**SHAPES[name]} | changes), encoding="utf-8"
    )
    return folder


def make_shape_adapter(folder: str | Path, model: str | Path, r: int = 16, seed: int = 0) -> Path:
    """Write a random adapter on all seven projections of every layer of a shape, in bfloat16."""
    folder, model = Path(folder), Path(model)
    modules = ModelConfig.from_folder(model).lora_modules()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in modules.items():
        if name.rpartition(".")[2] in LAYER_MODULES:
            a = torch.randn(r, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, r, generator=generator) * 0.1 * r**-0.5
            tensors |= lora_tensors(name, a.bfloat16(), b.bfloat16())
    config = {**lora_config(model), "r": r, "lora_alpha": r}
    write_adapter(folder, {**config, "target_modules": list(LAYER_MODULES)}, tensors)
    return folder
