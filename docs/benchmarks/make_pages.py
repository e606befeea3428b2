"""Make the benchmark pages from the results beside them: ``python docs/benchmarks/make_pages.py``.

With ``--check`` it writes nothing and fails if a page is not what its JSON says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_page
import elsewhere_page
import graphs_page
import kernels_page

FOLDER = Path(__file__).parent
PAGES: Mapping[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "kernels.md": (kernels_page.page, ("h200-kernels.json", "h200-elsewhere.json")),
    "graphs.md": (graphs_page.page, ("h200-graphs.json", "h200-elsewhere.json")),
    "elsewhere.md": (elsewhere_page.page, ("h200-elsewhere.json",)),
    "cpu.md": (cpu_page.page, ("cpu-decode.json", "cpu-peers.json")),
}


def main(argv: Sequence[str]) -> int:
    """Write the pages, or compare them."""
    wrong = 0
    for name, (page, results) in PAGES.items():
        text = page(*(_read(result) for result in results))
        file = FOLDER / name
        if "--check" not in argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{name} is not what its JSON says; run python docs/benchmarks/make_pages.py")
            wrong += 1
    return int(wrong > 0)


def _read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
