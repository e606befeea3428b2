"""Small checkpoints written by hand, whole or broken on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minilora.config import ModelConfig
from minilora.lora.layers import LayerOptions
from minilora.model.llama import Llama

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def config_dict(**changes: Any) -> dict[str, Any]:
    """The `config.json` of a Llama of two layers, four heads of four and two KV heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return {**config, **changes}


def empty_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Llama:
    """A model whose weights are all NaN: what a loader leaves out shows."""
    config = ModelConfig.from_dict(config_dict(**changes))
    model = Llama(config, 64, LayerOptions(dtype, torch.device("cpu")))
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    return model


def random_tensors(seed: int = 0, **changes: Any) -> Tensors:
    """The tensors that a checkpoint of `config_dict(**changes)` has to hold."""
    gen = torch.Generator().manual_seed(seed)
    targets = empty_model(**changes).checkpoint_tensors()
    return {name: torch.randn(target.shape, generator=gen) for name, target in targets}


def write_single(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """One `model.safetensors`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_shards(
    folder: Path, shards: Mapping[str, Tensors], weight_map: object | None = None
) -> Path:
    """Several files and an index of them, which can be made to say something else."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Two parts of a checkpoint, cut in the middle of a layer."""
    items = list(tensors.items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header at all."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
