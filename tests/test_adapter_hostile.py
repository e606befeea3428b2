"""Damaged and hostile adapter folders: refused in bounded time, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora.lora.adapter_files import MAX_HEADER_BYTES
from minilora.lora.peft_config import MAX_PATTERN_TEXT
from tests.adapter_folders import (
    CONFIG_FILE,
    EMBEDDING,
    MODEL,
    PREFIX,
    WEIGHTS_FILE,
    Q,
    V,
    keys,
    load,
    lora,
    refusal,
    write,
)

KEY_A, KEY_B = keys(Q)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HUGE = 1 << 40
WEIGHTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty (0 bytes)"),
    "three_bytes": (b"abc", "the file is damaged"),
    "no_tensors": (safetensors({}), "it holds no tensors, so the adapter has no weights"),
    "metadata_only": (safetensors({"__metadata__": {"format": "pt"}}), "it holds no tensors"),
    "no_json": (safetensors(b"{" * 16), "the file is damaged"),
    "a_list": (safetensors([1, 2]), "the file is damaged"),
    "deep": (safetensors(b"[" * 100_000), "the file is damaged"),
    "header_too_long": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "its header claims"),
    "header_of_exabytes": (struct.pack("<Q", 1 << 62), "its header claims"),
    "header_beyond_the_file": (struct.pack("<Q", 1000) + b"{}", "the file is damaged"),
    "offsets_beyond_the_file": (
        safetensors({KEY_A: entry([8, HUGE], 0, 32 * HUGE)}), "the file is damaged"
    ),
    "shape_against_offsets": (
        safetensors({KEY_A: entry([8, HUGE], 0, 4)}, b"abcd"), "the file is damaged"
    ),
    "shape_overflow": (
        safetensors({KEY_A: entry([HUGE, HUGE], 0, 4)}, b"abcd"), "the file is damaged"
    ),
    "negative_shape": (safetensors({KEY_A: entry([-8, -32], 0, 1024)}, b"x" * 1024), "is damaged"),
    "overlapping": (
        safetensors({KEY_A: entry([1], 0, 4), KEY_B: entry([1], 0, 4)}, b"abcd"), "is damaged"
    ),
    "unknown_dtype": (safetensors({KEY_A: entry([1], 0, 4, "X9")}, b"abcd"), "is damaged"),
    "a_long_key": (
        safetensors({"k" * 1_000_000: entry([1], 0, 4)}, b"abcd"), "none of its 1 tensors fits"
    ),
    "a_long_feature": (
        safetensors({"k" * 1_000_000 + ".bias": entry([1], 0, 4)}, b"abcd"), "bias (tensors 'kkkk"
    ),
    "a_long_module": (
        safetensors({"m." * 500_000 + "lora_A.weight": entry([1], 0, 4)}, b"abcd"), "no such module"
    ),
    "many_lora_parts": (
        safetensors({".lora_A" * 100_000: entry([1], 0, 4)}, b"abcd"), "no tensor of LoRA"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_l9_bad_safetensors(tmp_path: Path, name: str) -> None:
    content, message = WEIGHTS[name]
    (write(tmp_path) / WEIGHTS_FILE).write_bytes(content)
    start = time.monotonic()
    text = refusal(tmp_path, WEIGHTS_FILE)
    assert message in text
    assert len(text) < 10_000
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_l9_a_truncated_file(tmp_path: Path, file_format: str, cut: int) -> None:
    file = write(tmp_path, file_format=file_format) / f"adapter_model.{file_format}"
    file.write_bytes(file.read_bytes()[:-cut])
    assert "the file is damaged" in refusal(tmp_path, file.name)


def test_a_huge_header_of_many_tensors(tmp_path: Path) -> None:
    """60,000 tensors of no model, in 5 MB: one bounded sentence, soon."""
    header = {f"t{i}.lora_A.weight": entry([0], 0, 0) for i in range(60_000)}
    (write(tmp_path) / WEIGHTS_FILE).write_bytes(safetensors(header))
    start = time.monotonic()
    text = refusal(tmp_path, WEIGHTS_FILE)
    assert "none of its 60000 tensors fits" in text
    assert "and 59988 more" in text
    assert time.monotonic() - start < 8


CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty (0 bytes)"),
    "no_json": (b"{peft", "is no valid JSON"),
    "no_text": (b"\xff\xfe\x00", "is no valid JSON"),
    "a_list": (b'["LORA"]', "must hold a JSON object, not a list"),
    "a_number": (b"8", "must hold a JSON object, not a int"),
    "deep": (b'{"x":' + b"[" * 200_000, "is no valid JSON"),
    "too_large": (b'{"x": "' + b"y" * (1 << 20) + b'"}', "1048576 bytes"),
    "a_huge_number": (
        b'{"peft_type": "LORA", "lora_alpha": 1, "r": 1' + b"0" * 4000 + b"}", "r=1000"
    ),
    "a_long_value": (
        json.dumps({"peft_type": "LORA", "lora_alpha": 1, "r": "9" * 900_000}).encode(), "r='999"
    ),
    "a_long_field": (
        json.dumps({"peft_type": "LORA", "lora_alpha": 1, "r": 8, "f" * 900_000: 1}).encode(),
        "ffff=1",
    ),
    "a_long_feature": (
        json.dumps({"peft_type": "LORA", "lora_alpha": 1, "r": 8, "x": "9" * 900_000}).encode(),
        "x='9999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config_files(tmp_path: Path, name: str) -> None:
    content, message = CONFIGS[name]
    (write(tmp_path) / CONFIG_FILE).write_bytes(content)
    features = name in ("a_long_field", "a_long_feature")  # told with those of the tensors
    text = refusal(tmp_path, WEIGHTS_FILE if features else CONFIG_FILE)
    assert message in text
    assert len(text) < 1000


class Exploit:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "was here")


def as_archive(content: Any, file: Path) -> None:
    torch.save(content, file)


def as_bare_pickle(content: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(content))


def as_legacy(content: Any, file: Path) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [as_archive, as_bare_pickle, as_legacy])
@pytest.mark.parametrize("where", ["value", "key_beside", "whole"])
def test_l11_a_pickle_is_not_run(
    tmp_path: Path, save: Callable[[Any, Path], None], where: str
) -> None:
    marker = tmp_path / "marker"
    exploit = Exploit(marker)
    content: Any = {
        "value": lora(Q) | {f"{PREFIX}{V}.lora_A.weight": exploit},
        "key_beside": {"state": lora(Q), "run": exploit},
        "whole": exploit,
    }[where]
    folder = write(tmp_path / "a", file_format="bin")
    save(content, folder / "adapter_model.bin")
    assert "the file is damaged" in refusal(folder, "adapter_model.bin")
    assert not marker.exists()
    pickle.loads(pickle.dumps(exploit))
    assert marker.exists(), "the exploit itself works"


PICKLED: dict[str, tuple[Any, str]] = {
    "a_list": ([torch.ones(2)], "must hold a dict from names to tensors"),
    "a_list_of_names": (["a", "b"], "must hold a dict from names to tensors"),
    "a_tensor": (torch.ones(2), "must hold a dict from names to tensors"),
    "number_keys": ({1: torch.ones(2)}, "must hold a dict from names to tensors"),
    "a_number": (lora(Q) | {"epoch": 3}, "'epoch' is no plain tensor but int"),
    "nested": ({"state_dict": lora(Q)}, "'state_dict' is no plain tensor but dict"),
    "sparse": ({KEY_A: torch.eye(8).to_sparse()}, f"'{KEY_A}' is no plain tensor"),
    "meta": ({KEY_A: torch.ones(8, 32, device="meta")}, f"'{KEY_A}' is no plain tensor"),
    "no_tensors": ({}, "it holds no tensors"),
    "integers": (lora(Q) | {KEY_A: torch.ones(8, 32, dtype=torch.int64)}, "the dtype int64"),
    "huge_by_stride": (lora(Q) | {KEY_A: torch.ones(1).expand(HUGE, 32)}, "the rank 1099511627776"),
}


@pytest.mark.parametrize("name", PICKLED)
def test_bad_values_in_a_bin(tmp_path: Path, name: str) -> None:
    content, message = PICKLED[name]
    folder = write(tmp_path, file_format="bin")
    torch.save(content, folder / "adapter_model.bin")
    assert message in refusal(folder, "adapter_model.bin")


def test_parameters_in_a_bin_are_tensors(tmp_path: Path) -> None:
    content = {key: torch.nn.Parameter(tensor) for key, tensor in lora(Q).items()}
    weights = load(write(tmp_path, content, "bin")).modules[Q]
    assert type(weights.a) is torch.Tensor
    assert not weights.a.requires_grad


def test_a_zip_bomb(tmp_path: Path) -> None:
    file = write(tmp_path, file_format="bin") / "adapter_model.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    data = next(name for name in parts if name.endswith("/data/0"))
    parts[data] = bytes(50_000_000)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert "it unpacks to more than it can hold" in refusal(tmp_path, file.name)


def test_a_storage_larger_than_its_record(tmp_path: Path) -> None:
    """A pickle that claims more bytes than the archive has for the tensor."""
    file = write(tmp_path, {KEY_A: torch.ones(8, 32)}, "bin") / "adapter_model.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    data = next(name for name in parts if name.endswith("/data/0"))
    parts[data] = parts.pop(data)[:16]  # and nothing behind it
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert "the file is damaged" in refusal(tmp_path, file.name)


SLOW = [
    "(a+)+$",
    "(.*)*x",
    "(.+)+x",
    "(?:.|.)" * 140 + "!",
    ".*" * 400 + "x",
    "(?:(?:.?){30}){30}x",
]


@pytest.mark.parametrize("source", SLOW)
@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]
)
def test_a_slow_regex_ends_soon(tmp_path: Path, field: str, source: str) -> None:
    value = {source: 8} if field.endswith("pattern") else source
    folder = write(tmp_path, **{field: value})
    start = time.monotonic()
    if field == "target_modules":
        assert "does not target it" in refusal(folder, WEIGHTS_FILE)
    else:
        assert set(load(folder).modules) == {Q, V}
    assert time.monotonic() - start < 2


def test_regexes_are_bounded_in_length_and_steps(tmp_path: Path) -> None:
    text = refusal(write(tmp_path / "long", target_modules="q" * 1001), CONFIG_FILE)
    assert "has 1001 characters; at most 1000 are matched" in text
    many = {f"{i:05}" + "q" * 95: 8 for i in range(MAX_PATTERN_TEXT // 100 + 1)}
    text = refusal(write(tmp_path / "many", rank_pattern=many), CONFIG_FILE)
    assert f"characters of patterns; at most {MAX_PATTERN_TEXT} are matched" in text
    costly = {"(?=.*)" * 160 + f"{i:04}x": 8 for i in range(60)}
    start = time.monotonic()
    layers = lora(*(name for name in MODEL.lora_modules() if name != EMBEDDING))
    text = refusal(write(tmp_path / "costly", layers, rank_pattern=costly), WEIGHTS_FILE)
    assert "its regexes take too many steps to match" in text
    assert time.monotonic() - start < 15


def test_nothing_is_allocated_before_shapes_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that does not fit is refused by the header; none is read."""

    def fail(*args: Any) -> Any:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("minilora.lora.adapter_files._SafetensorsFile.read", fail)
    monkeypatch.setattr("minilora.lora.adapter_files._PickledFile.read", fail)
    for file_format in ("safetensors", "bin"):
        write(tmp_path, lora(Q) | {KEY_A: torch.ones(8, 33)}, file_format)
        assert "(8, 33)" in refusal(tmp_path, f"adapter_model.{file_format}")
        (tmp_path / f"adapter_model.{file_format}").unlink()
