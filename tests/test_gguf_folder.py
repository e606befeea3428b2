"""A GGUF file becomes a Hugging Face folder: the same weights, the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import HIDDEN, TOKENS, gguf, make_gguf, transformers

from minilora import CheckpointError, gguf_folder
from minilora.config import ModelConfig


def convert(tmp_path: Path, **changes: Any) -> tuple[Any, Path]:
    model = make_gguf(tmp_path / "tiny.gguf", **changes)
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_folder.convert_gguf(tmp_path / "tiny.gguf", folder)
    return model, folder


@pytest.mark.parametrize("tied", [True, False])
def test_folder_holds_the_model_that_the_gguf_was_made_from(tmp_path: Path, tied: bool) -> None:
    model, folder = convert(tmp_path, tied=tied)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_minilora_reads_the_config(tmp_path: Path) -> None:
    model, folder = convert(tmp_path)
    config = ModelConfig.from_folder(folder)
    assert (config.rms_norm_eps, config.rope.theta) == (1e-5, 50000.0)  # decimals, not float32's
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
    assert config.head_dim == model.config.head_dim
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_wrong_row_order_shows_in_the_logits(tmp_path: Path, monkeypatch: Any) -> None:
    """The test above can fail: without the reordering the logits are another model's."""
    monkeypatch.setattr(gguf_folder, "uninterleave", lambda weight, heads: weight)
    model, folder = convert(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        assert not torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-2)


def test_tokenizer(tmp_path: Path) -> None:
    _, folder = convert(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the the") == ["t", "he", "Ġthe"]
    # Digits come apart before anything else is split: so two spaces stay together before one.
    assert tokenizer.tokenize("a12  1") == ["a", "1", "2", "ĠĠ", "1"]
    assert tokenizer.tokenize("t<|im_end|>he") == ["t", "<|im_end|>", "he"]
    assert tokenizer.encode("<|im_start|>") == [1]  # one token, and nothing put before it
    text = "naïve ½ 漢字 🙂\r\n\tdef f(x):  return x**2 \u00a0 \x00 <|im_end|> 2024"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"  # the byte that it lacks
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert named == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi<|im_end|>"


ONE = (np.ones((1, HIDDEN), np.float32), gguf.GGMLQuantizationType.F32)
NAN = (np.full(HIDDEN, np.nan, np.float32), gguf.GGMLQuantizationType.F32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general__architecture": "qwen2"}, "'qwen2', not a 'llama'"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type may change the maths"),
        ({"drop": "llama.block_count"}, "llama.block_count is missing"),
        ({"llama__attention__key_length": 32}, "differ; minilora has one size of head"),
        ({"llama__block_count": 3}, "lacks the tensor blk.2.attn_k.weight"),
        ({"llama__block_count": 1 << 30}, "num_hidden_layers=1073741824"),
        ({"llama__embedding_length": 1 << 17}, "has shape"),
        ({"drop": "blk.1.ffn_up.weight"}, "lacks the tensor blk.1.ffn_up.weight"),
        ({"blk__0__attn_q__bias": ONE}, "unknown tensor blk.0.attn_q.bias"),
        ({"blk__1__attn_v__weight": ONE}, "blk.1.attn_v.weight has shape (1, 64), not (32, 64)"),
        ({"output_norm__weight": NAN}, "output_norm.weight holds NaN"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe'"),
        ({"tokenizer__ggml__add_bos_token": True}, "tokenizer.ggml.add_bos_token=True"),
        ({"drop": "tokenizer.ggml.merges"}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["q z"]}, "holds 'q z', which joins no two tokens"),
        ({"tokenizer__ggml__merges": ["Ġthe"]}, "holds 'Ġthe', which joins no two tokens"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "holds a token twice"),
        ({"tokenizer__ggml__token_type": [1]}, "one type for each token"),
        ({"tokenizer__ggml__token_type": [6] * len(TOKENS)}, "token_type holds 6"),
        ({"tokenizer__ggml__eos_token_id": 99999}, "eos_token_id=99999"),
    ],
)
def test_gguf_that_cannot_be_converted(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path, **changes)
    assert said in str(error.value)
    assert "tiny.gguf" in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -64, -20000])
def test_truncated_gguf(tmp_path: Path, keep: int) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is damaged"):
        gguf_folder.convert_gguf(tmp_path / "cut.gguf", tmp_path)
