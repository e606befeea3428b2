"""The tutorials as pages and notebooks of the site.

Usage: python docs/tools/render.py   runs every tutorial whose result is not kept yet.

What a tutorial showed is kept in ``.cache/tutorials`` until it, the package, the files it reads,
these scripts or the versions of what it runs on change, so that `mkdocs serve` does not run
everything at each save.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tutorials"
SITE = Path(__file__).parent
_READ = (
    "minilora/**/*",
    "tutorials/smollm2_adapters/**/*",
    "docs/benchmarks/*.json",
    "docs/tools/*.py",
)
_WHERE_TO_START = (
    "*Start Jupyter in the root of minilora's repository, after `pip install -e '.[docs]'`: the "
    "notebook reads files of it.*"
)
_RUN_WITH = ("torch", "matplotlib", "transformers", "peft")


def tutorial_paths() -> list[Path]:
    """Return the tutorials in reading order."""
    return sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))


def result_of(path: Path) -> dict[str, Any]:
    """Return what a tutorial showed; run it if that is not known.

    Raises:
        RuntimeError: it failed; the message ends with its traceback.
    """
    kept = _kept_result(path)
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            out = Path(scratch) / "out.json"
            name = path.relative_to(ROOT)
            command = [sys.executable, str(SITE / "execute.py"), str(name), str(out)]
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # two of them run at a time
            ran = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
            if ran.returncode:
                raise RuntimeError(f"{name} failed:\n{ran.stdout}{ran.stderr}")
            for old in CACHE.glob(f"{path.stem}-*.json"):
                old.unlink()
            out.replace(kept)
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def _kept_result(path: Path) -> Path:
    return CACHE / f"{path.stem}-{_key(path)}.json"


def _key(path: Path) -> str:
    """Return a hash of all that a tutorial's output depends on."""
    digest = hashlib.sha256(path.read_bytes())
    digest.update(" ".join([sys.version, *map(version, _RUN_WITH)]).encode())
    for source in sorted(source for pattern in _READ for source in ROOT.glob(pattern)):
        if source.is_file() and "__pycache__" not in source.parts:
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def page(path: Path, result: dict[str, Any]) -> str:
    """Return a tutorial as Material Markdown: texts, code, what it printed, figures."""
    downloads = (
        f'<p class="downloads">Download: <a href="../{path.name}" download>script</a> · '
        f'<a href="../{path.stem}.ipynb" download>notebook</a></p>'
    )
    parts = []
    for cell in result["cells"]:
        parts += [cell["text"]] if cell["markdown"] else _code(cell)
        if len(parts) == 1:
            parts.append(downloads)
    return "\n\n".join([*parts, ""])


def _code(cell: dict[str, Any]) -> list[str]:
    parts = [f"```python\n{cell['text']}\n```"]
    if cell["stdout"].strip():
        parts.append(f"``` {{ .text .output }}\n{cell['stdout'].rstrip()}\n```")
    parts += [f"<figure>\n{svg}\n</figure>" for svg in cell["figures"]]
    return parts


def notebook(result: dict[str, Any]) -> str:
    """Return a tutorial as a Jupyter notebook without outputs (nbformat 4.5)."""
    start = {"markdown": True, "text": _WHERE_TO_START}
    cells = []
    for index, cell in enumerate([start, *result["cells"]]):
        entry: dict[str, Any] = {"id": f"cell-{index}", "metadata": {}}
        entry |= {"source": cell["text"].splitlines(keepends=True)}
        if cell["markdown"]:
            entry["cell_type"] = "markdown"
        else:
            entry |= {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(entry)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    return json.dumps(book, indent=1) + "\n"


def main(paths: Sequence[Path]) -> int:
    """Run what must be run, two at a time, and print the seconds of each; 1 if one failed."""
    failed = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for path, future in [(path, pool.submit(_timed, path)) for path in paths]:
            try:
                print(f"{path.name:36} {future.result()}", flush=True)
            except RuntimeError as error:
                failed += 1
                print(error, flush=True)
    print(f"{len(paths) - failed} tutorials passed, {failed} failed")
    return 1 if failed else 0


def _timed(path: Path) -> str:
    kept = _kept_result(path).exists()
    return f"{result_of(path)['seconds']:5.1f} s{' (kept)' if kept else ''}"


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or tutorial_paths()))
