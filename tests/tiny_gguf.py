"""A tiny Llama written as a GGUF file, with quantised weights and llama.cpp's order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 16, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ t", "h e", "Ġt he", "1 2", "Ġ 1"]
# Like SmolLM2's, this vocabulary lacks a byte (04) and the merges would join digits.
TOKENS = (
    SPECIAL
    + [byte for byte in sorted(ByteLevel.alphabet()) if byte != "Ą"]
    + [merge.replace(" ", "") for merge in MERGES]
)
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
KINDS = {"attn_q": "Q8_0", "attn_k": "F16", "ffn_down": "Q8_0", "ffn_up": "F16"}  # others F32


def make_model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        rms_norm_eps=1e-5, rope_theta=50000.0, tie_word_embeddings=tied, initializer_range=0.2,
        max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows, said one row at a time: pair i of a head is rows i, i + half."""
    out, half = np.empty_like(weight), HEAD_DIM // 2
    for head in range(heads):
        for i in range(half):
            out[head * HEAD_DIM + 2 * i] = weight[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = weight[head * HEAD_DIM + half + i]
    return out


def default_fields() -> dict[str, Any]:
    return {
        "llama.vocab_size": len(TOKENS), "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER, "llama.block_count": 2,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 128, "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 50000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }  # fmt: skip


def gguf_tensors(model: Any) -> dict[str, tuple[np.ndarray, Any]]:
    """Every weight as the file stores it; the model gets what is left after quantising it."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not model.config.tie_word_embeddings:
        names["output"] = "lm_head"
    for layer in range(2):
        names |= {f"blk.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in PARTS.items()}
    tensors = {}
    for stored, name in names.items():
        part = stored.split(".")[-1]
        kind = gguf.GGMLQuantizationType[KINDS.get(part, "F32")]
        weight = model.get_submodule(name).weight.data
        data = gguf.quants.quantize(weight.numpy().copy(), kind)
        rounded = gguf.quants.dequantize(data, kind)
        weight.copy_(torch.from_numpy(np.array(rounded, dtype=np.float32)))
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        tensors[f"{stored}.weight"] = (interleave(data, heads) if heads else data, kind)
    return tensors


def write_gguf(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", "llama"))
    for key, value in fields.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            str: writer.add_string, list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_gguf(path: Path, drop: str = "", tied: bool = True, **changes: Any) -> Any:
    """Write the tiny model; `changes` are fields or tensors (``__`` for a dot), `drop` one name."""
    model = make_model(tied)
    fields, tensors = default_fields(), gguf_tensors(model)
    for name, value in changes.items():
        content = tensors if isinstance(value, tuple) else fields
        content[name.replace("__", ".")] = value
    for content in (fields, tensors):
        content.pop(drop, None)
    write_gguf(path, fields, tensors)
    return model
