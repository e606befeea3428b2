"""Run one tutorial cell by cell and write what each cell showed, as JSON.

Usage: python docs/tools/execute.py tutorials/01_name.py out.json

A process of its own a tutorial: some set variables that count before an import. Cells keep the
file's name and lines, so that tracebacks and `inspect.getsource` (which Triton needs) find them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from cells import Cell, read_cells

# The site's pages must not depend on the machine's terminal.
os.environ.update(NO_COLOR="1", COLUMNS="96", TERM="dumb")


def run(path: Path) -> dict[str, Any]:
    """Return the outputs of each cell, and the seconds of all."""
    from figures import open_figures, use_style

    use_style()
    start, shown = time.perf_counter(), []
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    for index, cell in enumerate(read_cells(path)):
        output = {"markdown": cell.markdown, "text": cell.text}
        if not cell.markdown:
            output["stdout"] = _run_cell(cell, path, names)
            output["figures"] = open_figures(f"{path.stem}-{index}")
        shown.append(output)
    return {"cells": shown, "seconds": round(time.perf_counter() - start, 1)}


def _run_cell(cell: Cell, path: Path, names: dict[str, Any]) -> str:
    """Run a cell; return what it printed, and the value of its last expression."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.text, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), names)
        if last is not None:
            expression = ast.Expression(last.value)  # type: ignore[attr-defined]
            value = eval(compile(expression, str(path), "eval"), names)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


if __name__ == "__main__":
    result = run(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
