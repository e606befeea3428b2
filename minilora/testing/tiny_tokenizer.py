"""A byte-level tokenizer for made checkpoints: any text in, the same text out."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from minilora.config.errors import ConfigError

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ("<pad>", "<s>", "</s>")
# Frequent pairs of letters are tokens of their own, so that a token can be more than a byte.
_MERGES = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "st")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int, max_length: int, chat_template: bool) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Ids 0 to 2 are `<pad>`, `<s>` (put in front of every text, as Llama does) and `</s>`; then
    come the bytes that UTF-8 uses, and as many pairs of letters as `vocab_size` has room for.

    Raises:
        ConfigError: `vocab_size` is too small for the bytes.
    """
    build_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        config["chat_template"] = CHAT_TEMPLATE
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the tokenizer; see `write_tokenizer`."""
    tokens = [*_SPECIAL, *_byte_tokens()]
    if vocab_size < len(tokens):
        raise ConfigError(
            f"make_tiny_llama: vocab_size={vocab_size} is too small for the tokenizer, which "
            f"needs {len(tokens)}; pass tokenizer=False"
        )
    pairs = _MERGES[: vocab_size - len(tokens)]
    vocab = {token: index for index, token in enumerate([*tokens, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def _byte_tokens() -> list[str]:
    """Return the character that stands for each byte that can occur in UTF-8 (243 of 256).

    Byte-level tokenizers write a byte as a printable character. The table is the library's own:
    it is applied to one character for every byte there is.
    """
    table = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    samples = [chr(code) for code in range(0x800)]  # every byte up to DF as lead or continuation
    samples += [chr(code) for code in range(0x1000, 0xD800, 0x1000)]  # E1 to ED
    samples += [chr(code) for code in (0x800, 0xE000, 0xF000)]  # E0, EE, EF
    samples += [chr(code) for code in (0x10000, 0x40000, 0x80000, 0xC0000, 0x100000)]  # F0 to F4
    found: dict[int, str] = {}
    for sample in samples:
        (mapped, _), *_ = table.pre_tokenize_str(sample)
        found.update(zip(sample.encode(), mapped, strict=True))
    return [found[byte] for byte in sorted(found)]
