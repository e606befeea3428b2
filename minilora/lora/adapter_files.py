"""Read the files of an adapter folder: bounded, and nothing that a file holds is ever run.

What tensors there are is known before any of them is read, so that a caller can check first.
"""

from __future__ import annotations

import abc
import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minilora.config.errors import AdapterError, shown

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")  # the first one there is read
MAX_HEADER_BYTES = 16 << 20
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a file; the dtype as that kind of file spells it."""

    shape: tuple[int, ...]
    dtype: str


class WeightsFile(abc.ABC):
    """The tensors of one file: `infos` has all their names; `read` and `pieces` read one.

    What is read may be a view of the mapped file, and must be copied to be kept.
    """

    def __init__(self, infos: dict[str, TensorInfo]) -> None:
        self.infos = infos

    @abc.abstractmethod
    def read(self, key: str) -> torch.Tensor:
        """Return a tensor."""

    @abc.abstractmethod
    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return some rows of a tensor."""

    def pieces(self, key: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a matrix in runs of rows of a bounded size."""
        rows, columns = self.infos[key].shape
        step = max(1, _PIECE_BYTES // (8 * columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield slice(start, stop), self.rows(key, start, stop)


def find_folder(path: str | os.PathLike[str], adapter_root: str | None) -> Path:
    """Return the folder of an adapter; with `adapter_root` it must be inside, links resolved."""
    text = os.fspath(path)
    valid = text and "\0" not in text
    if valid:
        _check_inside(text, adapter_root)
    if not valid or not os.path.isdir(text):
        raise AdapterError(f"{shown(text, 500)} is no folder; give the folder that PEFT saved")
    return Path(text)


def find_files(folder: Path, adapter_root: str | None) -> tuple[Path, Path]:
    """Return the config and the weights of an adapter folder, both regular files."""
    config = _regular_file(folder / CONFIG_NAME, adapter_root)
    if config is None:
        raise AdapterError(f"{folder} has no {CONFIG_NAME}; give the folder that PEFT saved")
    for name in WEIGHTS_NAMES:
        weights = _regular_file(folder / name, adapter_root)
        if weights is not None:
            return config, weights
    raise AdapterError(f"{folder} has neither {' nor '.join(WEIGHTS_NAMES)}")


def _regular_file(file: Path, adapter_root: str | None) -> Path | None:
    if not os.path.lexists(file):
        return None
    _check_inside(file, adapter_root)
    if not file.is_file():  # reading a pipe or a device could wait for ever
        raise AdapterError(f"{file} is no regular file")
    if file.stat().st_size == 0:
        raise AdapterError(f"{file} is empty (0 bytes)")
    return file


def _check_inside(path: str | Path, adapter_root: str | None) -> None:
    if adapter_root is None:
        return
    root, real = os.path.realpath(adapter_root), os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise AdapterError(
            f"{str(path)!r} is outside adapter_root={adapter_root!r}; "
            "only adapters below that folder are read"
        )


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[WeightsFile]:
    """Open the weights of an adapter.

    Raises:
        AdapterError: the file is damaged, too large in what has to be read first, or not made of
            plain tensors.
    """
    if file.suffix == ".bin":
        yield _PickledFile(_load_pickled(file))
        return
    _check_header_size(file)
    try:
        with safe_open(file, framework="pt") as content:
            yield _SafetensorsFile(content)
    except SafetensorError as error:
        raise AdapterError(f"the file is damaged: {error}") from None


def _check_header_size(file: Path) -> None:
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise AdapterError(
            f"the file is damaged: its header claims {size} bytes; at most {MAX_HEADER_BYTES} "
            "are read"
        )


class _SafetensorsFile(WeightsFile):
    def __init__(self, content: Any) -> None:
        self._content = content
        slices = {key: content.get_slice(key) for key in list(content.keys())}
        super().__init__(
            {key: TensorInfo(tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}
        )

    def read(self, key: str) -> torch.Tensor:
        return self._content.get_tensor(key)  # type: ignore[no-any-return]

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self._content.get_slice(key)[start:stop]  # type: ignore[no-any-return]


class _PickledFile(WeightsFile):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        super().__init__(
            {
                key: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for key, t in tensors.items()
            }
        )

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[key][start:stop]


def _load_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Map a file of `torch.save`: its tensors stay on disk until they are read."""
    _check_archive(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a hostile pickle provokes
        first_line = str(error).strip().partition("\n")[0]
        raise AdapterError(
            f"the file is damaged or holds more than tensors: {first_line}; "
            "save the adapter as safetensors"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise AdapterError("the file must hold a dict from names to tensors")
    for key, value in content.items():
        if not _is_plain(value):
            raise AdapterError(f"{shown(key, 200)} is no plain tensor but {type(value).__name__}")
    return {key: value.detach() for key, value in content.items()}


def _check_archive(file: Path) -> None:
    """Refuse what `torch.save` does not write: its archives are not compressed (no zip bomb)."""
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        raise AdapterError("the file is damaged: it is no archive of torch.save") from None
    pickles = (size for name, size in sizes.items() if name.endswith(".pkl"))
    if sum(sizes.values()) > file.stat().st_size or sum(pickles) > MAX_HEADER_BYTES:
        raise AdapterError("the file is damaged: it unpacks to more than it can hold")


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
    )
