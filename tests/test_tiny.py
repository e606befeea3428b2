"""The made checkpoints and their tokenizer, as transformers reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from minilora import ConfigError
from minilora.config import ModelConfig
from minilora.testing import make_tiny_llama
from minilora.testing.tiny_tokenizer import build_tokenizer
from tests.reference import PeftReference

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Options, and what transformers must find in the config for them.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"vocab_size": 256, "head_dim": 16, "num_key_value_heads": 2}),
    "sizes": (
        {
            "vocab_size": 300,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "max_position_embeddings": 99,
            "rms_norm_eps": 1e-3,
        },
        {"vocab_size": 300, "head_dim": 8, "rms_norm_eps": 1e-3, "max_position_embeddings": 99},
    ),
    "head_dim": ({"head_dim": 32}, {"head_dim": 32}),
    "head_dim null": ({"extra_config": {"head_dim": None}}, {"head_dim": 16}),
    "tied": ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "biases": (
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ({"architecture": "MistralForCausalLM"}, {"sliding_window": None}),
    "bfloat16": ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16}),
    "float16, new names": (
        {"dtype": "float16", "rope_spelling": "rope_parameters"},
        {"dtype": torch.float16},
    ),
    "sharded": ({"shards": 3}, {}),
    "theta": ({"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}),
    "linear": ({"rope_scaling": LINEAR}, {"rope_parameters": LINEAR}),
    "llama3": ({"rope_scaling": LLAMA3}, {"rope_parameters": LLAMA3}),
    "llama3, new names": (
        {"rope_scaling": LLAMA3, "rope_spelling": "rope_parameters"},
        {"rope_parameters": LLAMA3},
    ),
    "several ends": ({"eos_token_id": [2, 7]}, {"eos_token_id": [2, 7]}),
}


def prompt(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * length + salt)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


def logits(folder: Path) -> torch.Tensor:
    return PeftReference(folder).logits(prompt(40))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_every_tensor_and_option(tmp_path: Path, name: str) -> None:
    options, expected = MODELS[name]
    folder = make_tiny_llama(tmp_path, **options)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(found.values()), found
    assert type(model).__name__ == options.get("architecture", "LlamaForCausalLM")
    for key, value in expected.items():
        got = getattr(model.config, key)
        got = {k: got[k] for k in value} if isinstance(value, dict) else got
        assert got == value, key
    assert model.generation_config.eos_token_id == options.get("eos_token_id", 2)
    for parameter in model.parameters():
        assert parameter.std() > 0.01, "no weight is left at a value that does nothing"
    ours = ModelConfig.from_folder(folder)
    assert ours.head_dim == model.config.head_dim
    assert ours.eos_token_ids == ((2, 7) if "eos_token_id" in options else (2,))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"shards": 3}),
        ({}, {"rope_spelling": "rope_parameters"}),
        ({}, {"head_dim": 16}),
        ({}, {"extra_config": {"head_dim": None}}),
        ({}, {"architecture": "MistralForCausalLM"}),
        ({}, {"tokenizer": False, "eos_token_id": None}),
        (
            {"rope_scaling": LLAMA3},
            {"rope_scaling": LLAMA3, "rope_spelling": "rope_parameters"},
        ),
        ({"rope_scaling": LINEAR}, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
def test_what_is_only_written_differently_gives_identical_logits(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first = logits(make_tiny_llama(tmp_path / "one", **one))
    second = logits(make_tiny_llama(tmp_path / "other", **other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["head_dim", "tied", "biases", "theta", "linear", "llama3"])
def test_what_changes_the_maths_changes_the_logits(tmp_path: Path, name: str) -> None:
    first = logits(make_tiny_llama(tmp_path / "one"))
    second = logits(make_tiny_llama(tmp_path / "other", **MODELS[name][0]))
    assert (first - second).abs().max() > 0.05 * (first.max() - first.min())


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    one, same, other = (
        make_tiny_llama(tmp_path / str(i), num_hidden_layers=layers, seed=seed)
        for i, (layers, seed) in enumerate([(2, 0), (3, 0), (2, 1)])
    )
    one, same, other = (load_file(f / "model.safetensors") for f in (one, same, other))
    for name, tensor in one.items():
        scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert scaled or torch.equal(tensor, same[name])
        assert not torch.equal(tensor, other[name])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_layers": 12},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
    ],
    ids=str,
)
def test_greedy_answers_are_varied_and_not_close_calls(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = PeftReference(make_tiny_llama(tmp_path, **options))
    gaps, distinct = [], []
    for length in (2, 5, 17, 100, 300):
        tokens = prompt(length)
        answer = model.greedy(tokens, 48)
        rows = model.logits([*tokens, *answer[:-1]])[-48:]
        best, second = rows.topk(2).values.T
        gaps.append((best - second) / (rows.amax(-1) - rows.amin(-1)))
        distinct.append(len(set(answer)))
    assert min(distinct) > 2, "not one token repeated"
    assert sum(distinct) / len(distinct) > 24
    assert torch.cat(gaps).median() > 0.02
    assert torch.cat(gaps).min() > 5e-6, "rounding in float32 is about 1e-6 of the range"


def test_the_answer_depends_on_tokens_far_back(tmp_path: Path) -> None:
    model = PeftReference(make_tiny_llama(tmp_path))
    tokens = prompt(300)
    changed = [*tokens[:50], (tokens[50] + 9) % 256, *tokens[51:]]
    before, after = model.logits(tokens)[-1], model.logits(changed)[-1]
    assert (before - after).abs().max() > 1e-3 * (before.max() - before.min())


TEXTS = ["hello the world\n\n 日本 🎉 é \x00\x7f  ", " lead", "", "the then", "\U0010ffff ퟿"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_the_text_back(text: str) -> None:
    tokenizer = build_tokenizer(256)
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text


def test_every_character_is_covered() -> None:
    tokenizer = build_tokenizer(246)
    for start in range(0, 0x110000, 0x4000):
        text = "".join(chr(c) for c in range(start, start + 0x4000, 7) if not 0xD800 <= c < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_tokenizer_in_transformers(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.encode("the") == build_tokenizer(256).encode("the").ids
    assert len(tokenizer.encode("the")) == 3, "<s>, th, e: a token can be more than a byte"
    talk = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<s>[user] hi</s>\n[assistant] "


def test_files_that_were_not_asked_for_are_not_there(tmp_path: Path) -> None:
    bare = make_tiny_llama(tmp_path / "bare", tokenizer=False)
    assert not list(bare.glob("tokenizer*"))
    plain = make_tiny_llama(tmp_path / "plain", chat_template=False)
    assert "chat_template" not in json.loads((plain / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 64}, "hidden_size"),
        ({"dtype": "bf16"}, "dtype='bf16'"),
        ({"vocab_size": 32}, "tokenizer=False"),
        ({"architecture": "MistralForCausalLM", "attention_bias": True}, "attention_bias"),
        ({"shards": 0}, "shards=0"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_llama(tmp_path, **options)


def test_nothing_here_imports_transformers_or_peft() -> None:
    code = (
        "import sys, minilora.testing;"
        "print({'transformers', 'peft'} & {name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
