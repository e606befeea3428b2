"""The layer order of the package, proved from the imports themselves (lazy ones too)."""

import ast
from pathlib import Path

import pytest

import minilora

ROOT = Path(minilora.__file__).parent
# A file may import from its own row and from the rows above it.
ROWS = [
    ["config", "demo_model"],
    ["ops"],
    ["batch", "step_buffers"],
    ["lora"],
    ["graphs"],
    ["model"],
    ["runner", "warmup"],
    ["engine"],
    ["testing"],
    ["bench"],
    ["fetch", "gguf_folder", "gguf_tokenizer"],
    ["cli", "__main__"],
]
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}
# Stricter than the rows: these may import only what is listed.
ONLY = {
    "graphs": {"graphs", "batch", "config", "ops.scratch"},
    "fetch": {"fetch", "gguf_folder", "gguf_tokenizer", "config"},
    "testing.oracle": {"config", "lora.adapter", "testing"},
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(source: str) -> set[str]:
    """Names below minilora that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name.removeprefix("minilora.") for name in found if name.startswith("minilora.")}
    return {name for name in names if name.split(".")[0] in ROW_OF}


def violations(module: str, imported: set[str]) -> set[str]:
    part = module.split(".")[0]
    wrong = {name for name in imported if ROW_OF[name.split(".")[0]] > ROW_OF[part]}
    for prefix, allowed in ONLY.items():
        if module.startswith(prefix):
            wrong |= {
                name
                for name in imported
                if not any(name == a or name.startswith(f"{a}.") for a in allowed)
            }
    return wrong


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_from_rows_above(path: Path) -> None:
    assert not violations(module_name(path), imports(path.read_text()))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.shrink", "from minilora.batch import Batch"),
        ("lora.slots", "def late():\n    from minilora.engine.llm import LLM"),
        ("graphs.cuda", "import minilora.model.llama"),
        ("testing.oracle", "from minilora.ops import lora_shrink"),
        ("testing.oracle", "from minilora.lora.slots import AdapterSlots"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, imports(source))


def test_every_part_has_a_row() -> None:
    parts = {module_name(path).split(".")[0] for path in FILES}
    assert parts <= set(ROW_OF)
