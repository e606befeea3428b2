"""Loading weights: whole checkpoints to the last bit, and every damaged one refused by name."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minilora import LLM, CheckpointError
from minilora.lora.layers import LayerOptions
from minilora.model import weights as weights_module
from minilora.model.kv_cache import KVCache, bytes_per_block
from minilora.model.layers import Attention
from minilora.model.llama import Llama
from minilora.model.weights import load_weights
from tests.checkpoints import (
    EMBED,
    HEAD,
    NORM,
    config_dict,
    empty_model,
    halves,
    random_tensors,
    raw_safetensors,
    write_shards,
    write_single,
)

Q = "model.layers.1.self_attn.q_proj.weight"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Llama:
    model = empty_model(dtype, **changes)
    load_weights(model, folder)
    return model


def refused(folder: Path, *matches: str, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """The checkpoint is refused in one line that holds all of `matches`."""
    with pytest.raises(CheckpointError) as caught:
        load(folder, dtype, **changes)
    message = str(caught.value)
    assert "\n" not in message
    for match in matches:
        assert re.search(match, message), f"{match!r} not in {message!r}"
    return message


def check(model: Llama, tensors: dict[str, torch.Tensor]) -> None:
    for name, target in model.checkpoint_tensors():
        assert torch.equal(target, tensors[name].to(target.dtype)), name
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


# ---- whole checkpoints


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [*DTYPES, torch.float64], ids=str)
def test_every_dtype_into_every_dtype(
    tmp_path: Path, dtype: torch.dtype, stored: torch.dtype
) -> None:
    tensors = {name: x.to(stored) for name, x in random_tensors().items()}
    check(load(write_single(tmp_path, tensors), dtype), tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True},
        {"head_dim": 32, "num_key_value_heads": 1},
        {"num_key_value_heads": 4, "hidden_size": 24},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_every_shape_of_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors = random_tensors(**changes)
    check(load(write_single(tmp_path, tensors), **changes), tensors)


def test_merged_weights_have_their_parts_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(attention_bias=True)
    model = load(write_single(tmp_path, tensors), attention_bias=True)
    layer: Any = model.layers[1]
    part = "model.layers.1.self_attn."
    for kind in ("weight", "bias"):
        parts = [tensors[f"{part}{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(layer.attention.qkv_proj, kind), torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))


@pytest.mark.parametrize("piece_bytes", [1, 100, 129, 640, 1 << 30])
def test_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(weights_module, "_PIECE_BYTES", piece_bytes)
    tensors = random_tensors()
    check(load(write_single(tmp_path, tensors)), tensors)


def test_a_nan_in_the_last_piece_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_PIECE_BYTES", 129)
    tensors = random_tensors()
    tensors[EMBED][-1, -1] = torch.nan
    refused(write_single(tmp_path, tensors), "model.safetensors", f"{EMBED} is not finite")


def test_shards(tmp_path: Path) -> None:
    tensors = random_tensors()
    first, second = halves(tensors)
    shards = {"model-1-of-2.safetensors": first, "model-2-of-2.safetensors": second}
    check(load(write_shards(tmp_path, shards)), tensors)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_shards(tmp_path, {"old.safetensors": random_tensors(seed=5)})
    check(load(write_single(tmp_path, tensors)), tensors)


def test_a_shard_may_be_a_link_as_in_the_hub_cache(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = write_shards(tmp_path / "snapshot", {"a.safetensors": tensors})
    (folder / "a.safetensors").rename(tmp_path / "blob")
    (folder / "a.safetensors").symlink_to(tmp_path / "blob")
    check(load(folder), tensors)


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    tensors = random_tensors()
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((2,), torch.nan),
        "model.rotary_emb.inv_freq": torch.ones(2),
    }
    check(load(write_single(tmp_path, {**tensors, **old})), tensors)


# ---- tied embeddings (M3)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="minilora")
    return lambda: [record.getMessage() for record in caplog.records]


def test_tied_without_a_head_in_the_file(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    tensors = random_tensors(tie_word_embeddings=True)
    assert HEAD not in tensors
    model = load(write_single(tmp_path, tensors), tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not warnings()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_tied_with_the_same_head_in_the_file(
    tmp_path: Path, warnings: Callable[[], list[str]], stored: torch.dtype
) -> None:
    tensors = random_tensors(tie_word_embeddings=True)
    tensors[EMBED] = tensors[EMBED].bfloat16().float()  # no bit is lost in either
    folder = write_single(tmp_path, {**tensors, HEAD: tensors[EMBED].to(stored, copy=True)})
    check(load(folder, tie_word_embeddings=True), tensors)
    assert not warnings()


@pytest.mark.parametrize(
    "head",
    [
        torch.zeros(32, 16),
        torch.full((32, 16), torch.nan),
        torch.zeros(31, 16),
        torch.zeros(32, 16, 1),
        torch.zeros(()),
        torch.zeros(0, 16),
        torch.zeros(32, 16, dtype=torch.int8),
        torch.zeros(32, 16).to(torch.float8_e4m3fn),  # torch refuses to compare it
    ],
    ids=["other", "nan", "short", "deep", "scalar", "empty", "int", "float8"],
)
def test_tied_with_another_head_in_the_file(
    tmp_path: Path, warnings: Callable[[], list[str]], head: torch.Tensor
) -> None:
    """The flag decides; a warning says that the file disagrees."""
    tensors = random_tensors(tie_word_embeddings=True)
    model = load(write_single(tmp_path, {**tensors, HEAD: head}), tie_word_embeddings=True)
    check(model, tensors)
    assert model.lm_head.weight is model.embed_tokens.weight
    (warning,) = warnings()
    assert "lm_head.weight differs" in warning
    assert "tie_word_embeddings" in warning


def test_tied_with_one_row_of_the_head_different(
    tmp_path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_PIECE_BYTES", 129)
    tensors = random_tensors(tie_word_embeddings=True)
    head = tensors[EMBED].clone()
    head[-1, -1] += 1
    load(write_single(tmp_path, {**tensors, HEAD: head}), tie_word_embeddings=True)
    assert len(warnings()) == 1


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[HEAD]
    refused(write_single(tmp_path, tensors), "lacks the tensors 'lm_head.weight'", "set tie_word")
    del tensors[NORM]
    message = refused(write_single(tmp_path, tensors), "lm_head.weight", "model.norm.weight")
    assert "tie_word" not in message


# ---- tensors


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[Q], tensors[NORM]
    refused(write_single(tmp_path, tensors), str(tmp_path), f"'{Q}', '{NORM}'$")
    message = refused(write_single(tmp_path, {EMBED: tensors[EMBED]}), "and 8 more")
    assert len(message) < 1500


def test_unknown_tensors_are_listed(tmp_path: Path) -> None:
    bias = Q.replace("weight", "bias")
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for name in (
        bias,
        "extra",
        "model.layers.2.mlp.up_proj.weight",
        f"{inv_freq}.x",
        f"x{inv_freq}",
    ):
        tensors = {**random_tensors(), name: torch.ones(2)}
        refused(
            write_single(tmp_path, tensors),
            "model.safetensors holds tensors",
            re.escape(repr(name)),
        )
    many = {f"extra.{i}": torch.ones(1) for i in range(500)}
    message = refused(write_single(tmp_path, {**random_tensors(), **many}), "and 488 more")
    assert len(message) < 1500
    long = {"x" * 10_000: torch.ones(1), "a\nb": torch.ones(1)}
    message = refused(write_single(tmp_path, {**random_tensors(), **long}), "'xxx", "a.+b")
    assert len(message) < 1500


def test_unknown_tensors_of_a_shard_name_their_file(tmp_path: Path) -> None:
    shards = {"a.safetensors": random_tensors(), "b.safetensors": {"extra": torch.ones(1)}}
    refused(write_shards(tmp_path, shards), "b.safetensors holds tensors", "'extra'")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (torch.zeros(31, 16), r"has the shape \(31, 16\); config.json asks for \(32, 16\)"),
        (torch.zeros(16, 32), r"has the shape \(16, 32\)"),
        (torch.zeros(33, 16), r"has the shape \(33, 16\)"),
        (torch.zeros(512), r"has the shape \(512,\)"),
        (torch.zeros(32, 16, 1), r"has the shape \(32, 16, 1\)"),
        (torch.zeros(0, 16), r"has the shape \(0, 16\)"),
        (torch.zeros(()), r"has the shape \(\)"),
        (torch.zeros(32, 16, dtype=torch.int32), "has the dtype I32; minilora reads BF16, F16"),
        (torch.zeros(32, 16, dtype=torch.int8), "has the dtype I8"),
        (torch.zeros(32, 16, dtype=torch.uint8), "has the dtype U8"),
        (torch.zeros(32, 16, dtype=torch.bool), "has the dtype BOOL"),
        (torch.zeros(32, 16).to(torch.float8_e4m3fn), "has the dtype F8_E4M3"),
        (torch.zeros(32, 16, dtype=torch.complex64), "has the dtype C64"),
        (torch.full((32, 16), torch.nan), "is not finite as float32"),
        (torch.full((32, 16), torch.inf), "is not finite as float32"),
        (torch.full((32, 16), 1e300, dtype=torch.float64), "is not finite as float32"),
        (torch.full((32, 16), torch.nan, dtype=torch.bfloat16), "is not finite as float32"),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype}{list(x.shape)}",
)
def test_a_tensor_that_does_not_fit(tmp_path: Path, wrong: torch.Tensor, match: str) -> None:
    folder = write_single(tmp_path, {**random_tensors(), EMBED: wrong})
    refused(folder, "model.safetensors", EMBED, match)


@pytest.mark.parametrize("name", [EMBED, NORM, Q, HEAD])
def test_one_bad_value_anywhere_is_found(tmp_path: Path, name: str) -> None:
    tensors = random_tensors()
    tensors[name].view(-1)[-1] = -torch.inf
    refused(write_single(tmp_path, tensors), f"{name} is not finite as float32")


def test_a_value_that_only_float16_cannot_hold(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[Q][0, 0] = 65520.0  # rounds to infinity
    folder = write_single(tmp_path, tensors)
    refused(folder, f"{Q} is not finite as float16", dtype=torch.float16)
    check(load(folder), tensors)
    check(load(folder, torch.bfloat16), tensors)
    tensors[Q][0, 0] = 65519.0  # rounds to the largest float16
    check(load(write_single(tmp_path, tensors), torch.float16), tensors)


def test_a_config_of_another_size_than_the_file(tmp_path: Path) -> None:
    folder = write_single(tmp_path, random_tensors())
    refused(folder, r"q_proj.weight has the shape \(16, 16\); .* \(64, 16\)", head_dim=16)
    refused(folder, "lacks the tensors 'model.layers.2", num_hidden_layers=3)
    refused(folder, "holds tensors .*'model.layers.1", num_hidden_layers=1)
    refused(folder, r"k_proj.weight has the shape \(8, 16\)", num_key_value_heads=4)


# ---- files

WHOLE = 8  # bytes of the length before a header


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:WHOLE],
        lambda raw: raw[:200],
        lambda raw: raw[:-100],
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: struct.pack("<Q", 1 << 60) + raw[WHOLE:],
        lambda raw: struct.pack("<Q", 0) + raw[WHOLE:],
        lambda raw: b"PK\x03\x04" + raw[4:],
        lambda raw: b"\x00" * len(raw),
        lambda raw: raw_safetensors([]),
        lambda raw: raw_safetensors({EMBED: {"dtype": "F32"}}),
        lambda raw: raw_safetensors({EMBED: entry("F32", [32, 16], 0, 4)}, b"\x00" * 4),
        lambda raw: raw_safetensors({EMBED: entry("F32", [1 << 40, 16], 0, 4)}, b"\x00" * 4),
        lambda raw: raw_safetensors({EMBED: entry("F32", [-1, 16], 0, 4)}, b"\x00" * 4),
        lambda raw: raw_safetensors({EMBED: entry("X9", [1], 0, 4)}, b"\x00" * 4),
        lambda raw: raw_safetensors(
            {EMBED: entry("F32", [1], 0, 4), NORM: entry("F32", [1], 0, 4)}, b"\x00" * 4
        ),
    ],
    ids=[
        "0 bytes",
        "8 bytes",
        "half a header",
        "100 bytes short",
        "1 byte short",
        "1 byte long",
        "huge header",
        "no header",
        "zip",
        "zeros",
        "header is a list",
        "entry without shape",
        "shape larger than data",
        "shape of petabytes",
        "negative shape",
        "unknown dtype",
        "overlap",
    ],
)
def test_a_damaged_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = write_single(tmp_path, random_tensors()) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(tmp_path, "model.safetensors cannot be read: ")


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors({}))
    refused(tmp_path, "lacks the tensors")


def test_no_file(tmp_path: Path) -> None:
    refused(tmp_path, "has neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "has neither")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors cannot be read")


# ---- indexes


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/passwd", "x/a.safetensors", ".", "..", "", "./a.safetensors"],
)
def test_an_index_that_points_outside(tmp_path: Path, name: str) -> None:
    tensors = random_tensors()
    (tmp_path / "a.safetensors").write_bytes(b"outside")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), EMBED: name}
    write_shards(tmp_path / "model", {"a.safetensors": tensors}, weight_map)
    refused(tmp_path / "model", "index.json names", re.escape(repr(name)))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("b.safetensors", "b.safetensors cannot be read: No such file"),
        ("a\0b", "index.json names|cannot be read"),
        ("a\nb", "index.json names|cannot be read"),
        ("a" * 300, "index.json names|cannot be read"),
        ("\ud800", "index.json names|cannot be read"),
    ],
    ids=["missing", "nul", "newline", "long", "surrogate"],
)
def test_an_index_that_names_no_file(tmp_path: Path, name: str, match: str) -> None:
    tensors = random_tensors()
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), EMBED: name}
    refused(write_shards(tmp_path, {"a.safetensors": tensors}, weight_map), match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "index.json is no valid JSON"),
        ("{", "index.json is no valid JSON"),
        ("[]", "index.json must hold a JSON object, not a list"),
        ("{}", "index.json has no weight_map"),
        ('{"weight_map": null}', "index.json has no weight_map"),
        ('{"weight_map": ["a.safetensors"]}', "index.json has no weight_map"),
        ('{"weight_map": {"a": 1}}', "index.json has no weight_map"),
        ('{"weight_map": {"a": null}}', "index.json has no weight_map"),
        ('{"weight_map": {}}', "lacks the tensors"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, match: str) -> None:
    write_shards(tmp_path, {"a.safetensors": random_tensors()})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, match)


def test_an_index_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path, {"a.safetensors": random_tensors()})
    size = (folder / "model.safetensors.index.json").stat().st_size
    monkeypatch.setattr(weights_module, "_MAX_INDEX_BYTES", size)
    load(folder)
    monkeypatch.setattr(weights_module, "_MAX_INDEX_BYTES", size - 1)
    refused(folder, "index.json .*bytes")


def load_or_name(folder: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    """The right weights, or a refusal that names the tensor."""
    try:
        model = load(folder)
    except CheckpointError as error:
        message = str(error)
    else:
        return check(model, tensors)
    assert name in message


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """It is not the file that happens to be read last which decides."""
    tensors = random_tensors()
    first, second = halves(tensors)
    shards = {"a.safetensors": first, "b.safetensors": {**second, EMBED: torch.zeros(32, 16)}}
    weight_map = {**dict.fromkeys(second, "b.safetensors"), **dict.fromkeys(first, "a.safetensors")}
    load_or_name(write_shards(tmp_path, shards, weight_map), tensors, EMBED)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    tensors = random_tensors()
    first, second = halves(tensors)
    shards = {"a.safetensors": first, "b.safetensors": second}
    weight_map = {**dict.fromkeys(second, "b.safetensors"), **dict.fromkeys(first, "a.safetensors")}
    weight_map[EMBED] = "b.safetensors"
    load_or_name(write_shards(tmp_path, shards, weight_map), tensors, EMBED)


def test_a_shard_that_is_damaged_is_named(tmp_path: Path) -> None:
    first, second = halves(random_tensors())
    write_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    raw = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(raw[:-100])
    refused(tmp_path, "b.safetensors cannot be read")
    save_file({**second, NORM: torch.zeros(16, dtype=torch.int64)}, tmp_path / "b.safetensors")
    refused(tmp_path, "b.safetensors: model.norm.weight has the dtype I64")


# ---- sizes are checked before memory is taken


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size"])
def test_a_config_of_terabytes_over_a_small_file(tmp_path: Path, name: str) -> None:
    """The file's header shows that it is no such model; nothing has to be allocated to see it."""
    folder = write_single(tmp_path, random_tensors())
    config = config_dict(hidden_size=1 << 18, head_dim=4, **{name: 1 << 20})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has the shape"):
        LLM(folder, num_kv_blocks=4, device="cpu")


def test_a_context_that_no_kv_pool_holds_takes_no_memory(tmp_path: Path) -> None:
    """A rotary table of 2^24 positions x 2048 is 256 GiB."""
    sizes = {"head_dim": 4096, "num_attention_heads": 1, "num_key_value_heads": 1}
    changes = {**sizes, "max_position_embeddings": 1 << 24, "num_hidden_layers": 1}
    folder = write_single(tmp_path, random_tensors(**changes))
    (folder / "config.json").write_text(json.dumps(config_dict(**changes)))
    llm = LLM(folder, num_kv_blocks=4, block_size=4, device="cpu")
    assert llm.max_model_len == 16


# ---- KVCache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache(dtype: torch.dtype) -> None:
    model = empty_model(dtype, head_dim=6, num_key_value_heads=2)
    cache = KVCache(model.config, 5, 3, dtype, torch.device("cpu"))
    assert cache.tensor.shape == (2, 2, 6, 3, 2, 6)
    assert cache.tensor.dtype == dtype
    assert not cache.tensor.any(), "what padding rows read is finite"
    per_block = bytes_per_block(model.config, 3, dtype)
    assert per_block * 6 == cache.tensor.nbytes


def test_every_layer_has_its_own_keys_and_values() -> None:
    model = empty_model()
    cache = KVCache(model.config, 2, 4, torch.float32, torch.device("cpu"))
    cache.bind(model)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(attentions) == 2
    for index, attention in enumerate(attentions):
        attention.k_cache.fill_(2 * index + 1)
        attention.v_cache.fill_(2 * index + 2)
        assert attention.k_cache.shape == (3, 4, 2, 4)
    assert [float(part.mean()) for part in cache.tensor.flatten(0, 1)] == [1, 2, 3, 4]


def test_a_cache_of_another_model_is_refused() -> None:
    cache = KVCache(empty_model().config, 2, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        cache.bind(empty_model(num_hidden_layers=3))


def test_layers_without_lora_have_no_slots() -> None:
    model = Llama(empty_model().config, 8, LayerOptions(torch.float32, torch.device("cpu")))
    assert all(a.numel() == 0 for layer in model.lora_layers() for a in layer.lora_a_stacked)
