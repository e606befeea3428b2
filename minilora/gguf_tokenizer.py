"""Turn the tokenizer inside a GGUF file into `tokenizer.json` and `tokenizer_config.json`.

Only SmolLM's kind is read: byte-level BPE whose pre-tokenizer first takes every digit apart
and then splits by GPT-2's rule (what GGUF calls ``tokenizer.ggml.pre = "smollm"``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minilora.config import CheckpointError

_PREFIX = "tokenizer.ggml."
# A value other than these would make other tokens out of the same text.
_REQUIRED = {"model": "gpt2", "pre": "smollm"}
_IF_PRESENT = {"add_bos_token": False, "add_eos_token": False, "add_space_prefix": False}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's token types


def write_tokenizer(fields: Mapping[str, Any], folder: Path, most_tokens: int) -> None:
    """Write the two tokenizer files of a Hugging Face folder.

    Bytes that the vocabulary lacks are dropped from a text, as SmolLM2's own `tokenizer.json`
    does (it names no unknown token). Of the bytes that UTF-8 uses these are the control
    characters 04, 06, 13, 14, 16 and 1D (hex) and F1, F2, which begin unassigned characters.

    Args:
        fields: the GGUF's metadata, key to value.
        folder: where the files go; it exists.
        most_tokens: length of the limit on a prompt that `tokenizer_config.json` states.

    Raises:
        CheckpointError: a field is missing, inconsistent, or of another kind of tokenizer.
    """
    _refuse_other_kinds(fields)
    tokens = _strings(fields, "tokens")
    build_tokenizer(fields, tokens).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": most_tokens,
        "clean_up_tokenization_spaces": False,
        **_special_tokens(fields, tokens),
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Return SmolLM's tokenizer over these `tokens` (id = place in the list)."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{_PREFIX}tokens holds a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(fields, vocab)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(fields, tokens))
    return tokenizer


def _refuse_other_kinds(fields: Mapping[str, Any]) -> None:
    wanted = {**_REQUIRED, **{key: v for key, v in _IF_PRESENT.items() if _PREFIX + key in fields}}
    for key, value in wanted.items():
        if fields.get(_PREFIX + key) != value:
            raise CheckpointError(
                f"{_PREFIX}{key}={fields.get(_PREFIX + key)!r} is not supported; "
                f"minilora reads SmolLM's tokenizer ({value!r})"
            )


def _strings(fields: Mapping[str, Any], name: str) -> list[str]:
    given = fields.get(_PREFIX + name)
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise CheckpointError(f"{_PREFIX}{name} is missing or no list of texts")
    return given


def _merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(fields, "merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(f"{_PREFIX}merges holds {merge!r}, which joins no two tokens")
        merges.append((left, right))
    return merges


def _added_tokens(fields: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    """Tokens that are found in a text before anything is split."""
    types = fields.get(_PREFIX + "token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{_PREFIX}token_type must hold one type for each token")
    if unknown := set(types) - {_NORMAL, _CONTROL, _USER_DEFINED}:
        raise CheckpointError(f"{_PREFIX}token_type holds {min(unknown)}; 1, 3 and 4 are read")
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind != _NORMAL
    ]


def _special_tokens(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """Return ``{"eos_token": "<|im_end|>", ...}`` for every special id that the GGUF states."""
    named: dict[str, str] = {}
    for gguf_name, name in (
        ("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")
    ):  # fmt: skip
        index = fields.get(f"{_PREFIX}{gguf_name}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise CheckpointError(f"{_PREFIX}{gguf_name}_token_id={index} is no token's id")
        named[f"{name}_token"] = tokens[index]
    return named
