"""What mkdocs calls while it builds the site; see ``hooks`` in ``mkdocs.yml``."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from diagrams import diagram
from render import notebook, page, result_of, tutorial_paths

_DIAGRAM = re.compile(r"^<!-- diagram: (\S+) -->$", re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add each tutorial as a page, a script and a notebook."""
    for path in tutorial_paths():
        result = result_of(path)
        made = {
            f"{path.stem}.md": page(path, result),
            path.name: path.read_text(encoding="utf-8"),
            f"{path.stem}.ipynb": notebook(result),
        }
        for name, content in made.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Draw the diagrams that a page asks for."""
    return _DIAGRAM.sub(lambda found: diagram(found[1]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers show without a script."""
    return _MATH.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    return str(
        convert(unescape(found[3].strip()), display="block" if found[2] == "[" else "inline")
    )
