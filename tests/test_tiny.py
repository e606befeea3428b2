"""The made checkpoints and adapters, as transformers and PEFT read them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from minilora import AdapterError, ConfigError
from minilora.config import ModelConfig
from minilora.config.model import LAYER_MODULES
from minilora.testing import (
    make_signature_adapter,
    make_signature_llama,
    make_tiny_adapter,
    make_tiny_llama,
)
from minilora.testing.tiny_tokenizer import build_tokenizer
from tests.reference import PeftReference

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|tied layer|is_gradient_checkpointing)"
)
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


EVERY = [*LAYER_MODULES, "embed_tokens", "lm_head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every": {"target_modules": EVERY},
    "one full name": {"target_modules": ["model.layers.1.mlp.up_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.1.*\.(q_proj|down_proj)"},
    "regex on embeddings": {"target_modules": r".*\.(embed_tokens|q_proj)|lm_head"},
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


FILE = "adapter_model.safetensors"


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


SIGNATURES = [("down", token) for token in range(32)] + [("v", token) for token in range(1, 17)]
Signature = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def signature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Signature]:
    root = tmp_path_factory.mktemp("signature")
    model = make_signature_llama(root / "model")

    def adapter(kind: str, token: int) -> Path:
        folder = root / f"{kind}-{token}"
        make_signature_adapter(folder, model, kind=kind, token=token, r=1 + token % 4)
        return folder

    return model, adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signatures_in_transformers_and_peft(
    signature: tuple[Path, Signature], dtype: torch.dtype
) -> None:
    folder, adapter = signature
    model = PeftReference(folder, dtype)
    tokens = [(7 * i) % 32 for i in range(90)]
    rows = model.logits(tokens)
    assert rows.argmax(-1).tolist() == [(token + 1) % 32 for token in tokens]
    assert margin(rows) > 0.9
    some = SIGNATURES if dtype == torch.float32 else SIGNATURES[::5]
    for kind, token in some:
        rows = model.logits(tokens, adapter(kind, token))
        assert set(rows.argmax(-1).tolist()) == {token}
        assert margin(rows) > 0.9
    assert model.greedy([3], 40, adapter("v", 5)) == [5] * 40


def margin(rows: torch.Tensor) -> float:
    """By how much of its height the best logit beats the second, in the worst row."""
    best, second = rows.float().topk(2).values.T
    return float(((best - second) / best).min())


@pytest.mark.parametrize(("stamped", "answer"), [(60, 2), (20, 7)])
def test_v_stamps_the_kv_cache(
    signature: tuple[Path, Signature], stamped: int, answer: int
) -> None:
    """A majority of a context of 80 tokens that another adapter wrote decides the answer."""
    folder, adapter = signature
    model = peft.PeftModel.from_pretrained(load_base(folder), adapter("v", 2), "v-2")
    model.load_adapter(adapter("v", 7), "v-7")
    cache = transformers.DynamicCache()
    for name, count in (("v-2", stamped), ("v-7", 80 - stamped)):
        model.set_adapter(name)
        rows = model(torch.full((1, count), 11), cache=cache, use_cache=True).logits
    assert int(rows[0, -1].argmax()) == answer


def test_a_stamped_cache_shows_under_the_base(signature: tuple[Path, Signature]) -> None:
    folder, adapter = signature
    model = peft.PeftModel.from_pretrained(load_base(folder), adapter("v", 2))
    cache = transformers.DynamicCache()
    model(torch.full((1, 50), 11), cache=cache, use_cache=True)
    with model.disable_adapter():
        rows = model(torch.full((1, 30), 11), cache=cache, use_cache=True).logits
    assert int(rows[0, -1].argmax()) == 2


def test_signatures_with_more_layers_ends_and_no_scale(tmp_path: Path) -> None:
    model = make_signature_llama(
        tmp_path / "model", num_hidden_layers=12, eos_token_id=[30, 7], dtype="bfloat16"
    )
    options: dict[str, Any] = {"token": 9, "dtype": "bfloat16"}
    down = make_signature_adapter(tmp_path / "down", model, **options)
    v = make_signature_adapter(tmp_path / "v", model, kind="v", r=16, **options)
    off = make_signature_adapter(tmp_path / "off", model, lora_alpha=0, **options)
    assert ModelConfig.from_folder(model).eos_token_ids == (30, 7)
    reference = PeftReference(model, torch.bfloat16)
    assert reference.greedy([4], 8, down) == reference.greedy([4], 8, v) == [9] * 8
    assert reference.greedy([4], 8, off) == reference.greedy([4], 8) == [5, 6, 7, 8, 9, 10, 11, 12]
    with safe_open(down / FILE, "pt") as content:
        assert len(list(content.keys())) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "up", "token": 1}, "kind='up'"),
        ({"kind": "v", "token": 17}, "token=17 must be an integer from 1 to 16"),
        ({"kind": "down", "token": 32}, "token=32"),
    ],
)
def test_signatures_that_do_not_exist(
    tmp_path: Path, signature: tuple[Path, Signature], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_signature_adapter(tmp_path, signature[0], **options)
