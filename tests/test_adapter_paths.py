"""Where an adapter is read from: missing files, odd files, and what lies outside adapter_root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from minilora.config import AdapterError
from minilora.lora.adapter import load_adapter
from tests.adapter_folders import CONFIG_FILE, MODEL, WEIGHTS_FILE, load, refusal, write


def test_missing_files(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / WEIGHTS_FILE).unlink()
    text = refusal(folder)
    assert "has neither adapter_model.safetensors nor adapter_model.bin" in text
    (folder / CONFIG_FILE).unlink()
    assert f"has no {CONFIG_FILE}" in refusal(folder)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_paths_that_cannot_be(path: str) -> None:
    for root in (None, os.getcwd()):
        with pytest.raises(AdapterError, match=r"adapter 'sql': .* is no folder"):
            load_adapter("sql", path, MODEL, max_lora_rank=8, adapter_root=root)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = write(tmp_path) / WEIGHTS_FILE
    assert "is no folder" in refusal(file)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, name: str) -> None:
    """Opening a pipe would wait for ever."""
    file = write(tmp_path) / name
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        (os.rmdir if file.is_dir() else os.unlink)(file)
        make(file)
        assert "is no regular file" in refusal(tmp_path, name)


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    file = write(tmp_path) / WEIGHTS_FILE
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    assert "is no regular file" in refusal(tmp_path, WEIGHTS_FILE)


def test_a_file_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(file))

    write(tmp_path)
    monkeypatch.setattr("minilora.lora.adapter_files.safe_open", refuse)
    assert "Permission denied" in refusal(tmp_path, WEIGHTS_FILE)


def test_adapter_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside")
    write(tmp_path / "root-beside-by-prefix")
    inside = write(root / "team" / "sql")
    (root / "link").symlink_to(outside)
    (root / "good-link").symlink_to(inside)
    for folder in (inside, root / "team" / ".." / "team" / "sql", root / "good-link"):
        assert load(folder, adapter_root=str(root)).modules
    for folder in (
        outside,
        root / ".." / "outside",
        root / "link",
        tmp_path / "root-beside-by-prefix",
        root / ".." / "gone",
    ):
        assert "is outside adapter_root=" in refusal(folder, adapter_root=str(root))
    assert load(root / "link").modules, "without a root every folder may be read"


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_linked_from_outside_of_adapter_root(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside")
    inside = write(root / "sql")
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)
    assert load(inside).modules
    assert "is outside adapter_root=" in refusal(inside, name, adapter_root=str(root))


def test_only_the_path_matters_not_the_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = write(root / "sql")
    adapter = load_adapter("../../etc", folder, MODEL, max_lora_rank=8, adapter_root=str(root))
    assert adapter.name == "../../etc"
