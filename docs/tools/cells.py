"""Read a tutorial: a plain script whose cells begin with ``# %%`` (the py:percent format)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?\s*$")


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        markdown: it is text; else code.
        text: its lines, without the marks of comments if it is text.
        line: where it begins in the file, counted from 1, so that a traceback finds it.
    """

    markdown: bool
    text: str
    line: int


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a tutorial; what stands before the first mark is left out.

    Raises:
        ValueError: a line of a text cell is no comment.
    """
    cells, lines, start, markdown = list[Cell](), list[str](), 0, None
    numbered = enumerate([*path.read_text(encoding="utf-8").splitlines(), "# %%"], start=1)
    for number, line in numbered:
        found = _MARK.match(line)
        if not found:
            lines.append(line)
            continue
        if markdown is not None:
            cells.append(_cell(path, markdown, lines, start))
        lines, start, markdown = [], number + 1, bool(found["markdown"])
    return [cell for cell in cells if cell.text]


def _cell(path: Path, markdown: bool, lines: list[str], start: int) -> Cell:
    while lines and not lines[0].strip():
        lines, start = lines[1:], start + 1
    text = "\n".join(_uncomment(path, lines, start) if markdown else lines).rstrip()
    return Cell(markdown, text, start)


def _uncomment(path: Path, lines: Iterable[str], start: int) -> Iterable[str]:
    for number, line in enumerate(lines, start=start):
        if line.strip() and not line.startswith("#"):
            raise ValueError(f"{path.name}, line {number}: a text cell has only comments: {line!r}")
        yield line[2:] if line.startswith("# ") else line[1:]
