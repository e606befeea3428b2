"""Where a command writes: a file that appears when it is whole, or standard output."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from minilora.config.errors import ConfigError

# Half a surrogate pair cannot be written as UTF-8; as \\udxxx it is valid JSON.
_UNWRITABLE = "backslashreplace"


def check_output(flag: str, file: str | os.PathLike[str] | None) -> None:
    """Refuse a name that no file can have, before any work.

    Raises:
        ConfigError: it is a folder, or lies in none.
    """
    if file is None:
        return
    target = Path(os.path.realpath(file))
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"{flag} {os.fspath(file)!r} must be a file in a folder that exists")


def write_anything(encoding: str | None = None) -> None:
    """Let standard output take characters that a terminal's encoding lacks, escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=encoding, errors=_UNWRITABLE)


@contextmanager
def open_output(flag: str, file: str | None) -> Iterator[IO[str] | None]:
    """Open what a flag names: a file, ``-`` for standard output, None for nothing.

    A file appears under its name when all is written: until then an old one, which may be the
    input, is not touched.

    Raises:
        ConfigError: see `check_output`.
    """
    if file is None:
        yield None
        return
    if file == "-":
        write_anything(encoding="utf-8")
        yield sys.stdout
        return
    check_output(flag, file)
    target = Path(os.path.realpath(file))  # a link stays one
    plain = target.is_file() or not target.exists()  # a pipe or a device takes it as it comes
    written = target.with_name(f".{target.name}.{os.getpid()}") if plain else target
    try:
        with written.open("w", encoding="utf-8", errors=_UNWRITABLE) as output:
            yield output
        if plain:
            written.replace(target)
    finally:
        if plain:
            written.unlink(missing_ok=True)
