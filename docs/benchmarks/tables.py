"""Markdown tables for the generated pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; an empty cell is a dash."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [["-" if cell is None else str(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def origin(data: Mapping[str, str]) -> str:
    """Return where a result is from, as one paragraph."""
    return (
        f"Machine: {data['machine']}. {data['versions']}. Date: {data['date']}. "
        f"Command: `{data['command']}`. Unit: {data['unit']}."
    )
