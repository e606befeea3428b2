"""Every public name is in the reference of the site, and the reference names what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "reference").glob("*.md")
REFERRED = {
    name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "minilora").rglob("*.py"))
    if "cli" not in path.parts and path.name != "__main__.py"  # the command line has its own page
}
Named = ast.FunctionDef | ast.ClassDef


def public(path: Path) -> list[Named]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [n for n in body if isinstance(n, Named) and not n.name.startswith("_")]


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if public(path)])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    if name in REFERRED:
        return
    left_out = [n.name for n in public(MODULES[name]) if f"{name}.{n.name}" not in REFERRED]
    assert not left_out


@pytest.mark.parametrize("name", sorted(REFERRED))
def test_what_the_reference_names_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert name in MODULES or attribute in {n.name for n in public(MODULES[module])}
