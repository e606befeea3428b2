"""Make the benchmark pages from the results beside them: ``python docs/benchmarks/make_pages.py``.

With ``--check`` it writes nothing and fails if a page is not what its JSON says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import graphs_page
import kernels_page

FOLDER = Path(__file__).parent
PAGES: Mapping[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "kernels.md": ("h200-kernels.json", kernels_page.page),
    "graphs.md": ("h200-graphs.json", graphs_page.page),
}


def main(argv: Sequence[str]) -> int:
    """Write the pages, or compare them."""
    wrong = 0
    for name, (results, page) in PAGES.items():
        text = page(json.loads((FOLDER / results).read_text(encoding="utf-8")))
        file = FOLDER / name
        if "--check" not in argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{name} is not what {results} says; run python docs/benchmarks/make_pages.py")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
