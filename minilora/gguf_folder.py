"""Write a Hugging Face folder from a GGUF file of a Llama (needs the ``gguf`` package).

GGUF is the one-file format of llama.cpp: metadata, tokenizer and (often quantised) weights.
Two things differ from a Hugging Face checkpoint and are undone here. Weights are dequantised
to float32, which holds every value as the quantised format defines it; bfloat16 and float16
would round a second time. And the rows of q and k are put back in order: llama.cpp rotates
neighbouring rows (2i, 2i+1) where transformers rotates rows (i, i + head_dim/2), so its
converter interleaves the two halves of each head.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minilora.config import CheckpointError, ConfigError, ModelConfig
from minilora.gguf_tokenizer import write_tokenizer

_SIZES = {
    "llama.vocab_size": "vocab_size",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.block_count": "num_hidden_layers",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.context_length": "max_position_embeddings",
}
_HEAD_DIM = (
    "llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"
)  # fmt: skip
_THETA, _EPS = "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"
_KNOWN = {*_SIZES, *_HEAD_DIM, _THETA, _EPS}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Array = npt.NDArray[np.float32]
Follow = Callable[[list[Any]], Iterable[Any]]


def convert_gguf(source: Path, folder: Path, follow: Follow = iter) -> None:
    """Write config, weights and tokenizer of the GGUF file `source` into `folder`, which exists.

    One tensor is in memory at a time, so the peak is the largest one in float32 (and the copy
    its dequantisation makes), not the model.

    Args:
        source: a GGUF file that the caller trusts (`fetch_smollm2` compares its hash).
        folder: gets config.json, generation_config.json, model.safetensors and the tokenizer.
        follow: wraps the list of tensors in a progress bar.

    Raises:
        CheckpointError: the ``gguf`` package is missing, the file is damaged, or it describes
            something other than a plain Llama with SmolLM's tokenizer.
    """
    reader = _open(source)
    try:
        fields = {key: field.contents() for key, field in reader.fields.items()}
        config = _config(fields, {tensor.name for tensor in reader.tensors})
        model = ModelConfig.from_dict(config)
        tensors = _in_order(reader.tensors, _names(model), _shapes(model))
        _write_json(folder / "config.json", config)
        special = {key: config[key] for key in config if key.endswith("_token_id")}
        _write_json(folder / "generation_config.json", special)
        write_tokenizer(fields, folder, model.max_position_embeddings)
        _write_weights(folder / "model.safetensors", tensors, model, follow)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{source.name} cannot be converted: {error}") from None
    except (ValueError, IndexError, TypeError, NotImplementedError) as error:  # from inside gguf
        raise CheckpointError(f"{source.name} is damaged: {error}") from None


def need_gguf() -> Any:
    """Return the ``gguf`` module; a `CheckpointError` says how to install it."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            "reading a GGUF file needs the gguf package; run: pip install 'minilora[smollm2]' "
            "(or: pip install gguf)"
        ) from None
    return gguf


def _open(source: Path) -> Any:
    gguf = need_gguf()
    try:
        return gguf.GGUFReader(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the reader checks little: a damaged file fails anywhere in it
        raise CheckpointError(f"{source.name} is damaged or no GGUF file: {error}") from None


def _config(fields: Mapping[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """Return the `config.json` that the metadata amounts to; refuse what it cannot express."""
    if fields.get("general.architecture") != "llama":
        raise CheckpointError(f"it holds a {fields.get('general.architecture')!r}, not a 'llama'")
    unknown = {key for key in fields if key.startswith("llama.")} - _KNOWN
    if unknown:
        raise CheckpointError(f"its field {min(unknown)} may change the maths and is not read")
    for key in (*_SIZES, _EPS):
        if key not in fields:
            raise CheckpointError(f"its field {key} is missing")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: fields[key] for key, name in _SIZES.items()},
        "head_dim": _head_dim(fields),
        "rms_norm_eps": _decimal(fields[_EPS]),
        "rope_theta": _decimal(fields.get(_THETA, 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    for gguf_name, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (token := fields.get(f"tokenizer.ggml.{gguf_name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def _head_dim(fields: Mapping[str, Any]) -> int:
    heads = max(1, fields["llama.attention.head_count"])
    given = {key: fields[key] for key in _HEAD_DIM if key in fields}
    if len(set(given.values())) > 1:
        raise CheckpointError(f"its fields {given} differ; minilora has one size of head")
    return int(next(iter(given.values()), fields["llama.embedding_length"] // heads))


def _decimal(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _names(model: ModelConfig) -> dict[str, str]:
    """Return name in the GGUF -> name in the Hugging Face folder, in the order of the model."""
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    for layer in range(model.num_hidden_layers):
        for part, module in _LAYER_PARTS.items():
            names[f"blk.{layer}.{part}.weight"] = f"model.layers.{layer}.{module}.weight"
    names["output_norm.weight"] = "model.norm.weight"
    if not model.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    return names


def _shapes(model: ModelConfig) -> Callable[[str], tuple[int, ...]]:
    features = model.lora_modules()

    def shape(name: str) -> tuple[int, ...]:
        if name.endswith("norm.weight"):
            return (model.hidden_size,)
        wide, out = features[name.removesuffix(".weight")]
        return (wide, out) if "embed_tokens" in name else (out, wide)

    return shape


def _in_order(
    found: Iterable[Any], names: Mapping[str, str], shape_of: Callable[[str], tuple[int, ...]]
) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return (Hugging Face name, shape, GGUF tensor) of every weight; all are there, none else."""
    tensors = {tensor.name: tensor for tensor in found}
    for problem, wrong in (
        ("has the unknown tensor", tensors.keys() - names.keys()),
        ("lacks the tensor", names.keys() - tensors.keys()),
    ):
        if wrong:
            raise CheckpointError(f"it {problem} {min(wrong)}")
    for gguf_name, name in names.items():
        stored = tuple(int(size) for size in reversed(tensors[gguf_name].shape))
        if stored != shape_of(name):
            raise CheckpointError(f"{gguf_name} has shape {stored}, not {shape_of(name)}")
    return [(name, shape_of(name), tensors[gguf_name]) for gguf_name, name in names.items()]


def _write_weights(
    path: Path, tensors: list[tuple[str, tuple[int, ...], Any]], model: ModelConfig, follow: Follow
) -> None:
    """Write a safetensors file as it goes (the library's own writer wants all tensors at once)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _ in tensors:
        start, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants aligned data
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, tensor in follow(tensors):
            file.write(_weight(name, shape, tensor, model).astype("<f4", copy=False).data)


def _weight(name: str, shape: tuple[int, ...], tensor: Any, model: ModelConfig) -> Array:
    """Return one weight in float32, contiguous, its rows in the order of transformers."""
    gguf = need_gguf()
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    weight: Array = np.ascontiguousarray(values, dtype=np.float32).reshape(shape)
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{tensor.name} holds NaN or infinity")
    heads = {
        "q_proj.weight": model.num_attention_heads, "k_proj.weight": model.num_key_value_heads
    }.get(".".join(name.split(".")[-2:]))  # fmt: skip
    return weight if heads is None else uninterleave(weight, heads)


def uninterleave(weight: Array, heads: int) -> Array:
    """Put rows (0, 1, 2, 3, ...) of each head in the order (0, 2, ..., 1, 3, ...).

    Args:
        weight: ``[heads * head_dim, in]``, rows as llama.cpp rotates them.
        heads: how many heads the rows hold.
    """
    rows, wide = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, wide)  # [heads, pair, member, in]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, wide)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
