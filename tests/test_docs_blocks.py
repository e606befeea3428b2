"""Every code block of README and docs is run, checked against the command line, or marked.

Blocks of Python are run, with made checkpoints where the page says "path/to/...". The pages on
graphs also show what their blocks print: `test_plugin_example.py` compares that. Lines of shell
are commands of ours, which must parse; scripts, which must exist; or commands that ``.ci/run``
runs. Any other block stands below a line ``<!-- not run: why -->``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from minilora.cli import _parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(<!-- not run: .+ -->\n)?```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
COMPARED = {"invariant.md", "dispatch.md", "harness.md"}  # by test_plugin_example.py
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
# What ``.ci/run`` runs, command by command.
RUN = {part.strip().replace(" -q", "") for line in CI.splitlines() for part in line.split(" && ")}
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
# Other commands that pages show, whole.
KNOWN = {
    "git clone <this repository>",
    "cd minilora",
    "mkdocs serve",
    "ruff format .",
    'pytest -n auto -m "not slow"',
}


def blocks(*languages: str) -> list[Any]:
    found = []
    for path in PAGES:
        for marked, language, _, text in BLOCK.findall(path.read_text(encoding="utf-8")):
            if language in languages and not marked:
                name = f"{path.name}-{len(found)}"
                found.append(pytest.param(path, text, id=name))
    return found


def test_every_block_says_its_language() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        languages = {language for _, language, _, _ in BLOCK.findall(text)}
        assert languages <= {"bash", "python", "text"}, path


@pytest.mark.parametrize(
    ("path", "text"), [p for p in blocks("python") if p.values[0].name not in COMPARED]
)
def test_python_runs(
    path: Path, text: str, tiny_llama: Path, tiny_adapter: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "llama").symlink_to(tiny_llama)
    (tmp_path / "adapters").mkdir()
    for seed, name in enumerate(("path/to/one", "path/to/two", "adapters/sql", "adapters/pirate")):
        (tmp_path / name).symlink_to(tiny_adapter(Path(name).name, seed=seed))
    exec(compile(text, path.name, "exec"), {"model": str(tiny_llama)})


@pytest.mark.parametrize(("path", "text"), blocks("bash"))
def test_shell_is_ours(path: Path, text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r" && ", line.split(" #")[0].strip()):
            if command:
                check(command)


def check(command: str) -> None:
    """Fail for a command of ours that does not parse, and for any that nobody knows."""
    if command in RUN | KNOWN or command.startswith("pip install torch --index-url "):
        return
    inner = re.fullmatch(r"MODEL=\$\((.*)\)", command)
    words = shlex.split(inner[1] if inner else command)
    if words[0] == "minilora":
        _parser().parse_args(words[1:])
        return
    extra = re.fullmatch(r"pip install -e '\.\[([\w,]+)\]'", command)
    if extra:
        assert set(extra[1].split(",")) <= EXTRAS, command
        return
    assert words[0] in ("python", "bash"), f"nobody knows {command!r}"
    assert (ROOT / words[1]).is_file(), f"{words[1]} does not exist"


@pytest.mark.parametrize(
    "command",
    [
        "minilora generate --modle x",
        "minilora nothing",
        "python tests/gone.py",
        "python -m gone",
        "bash gone",
        "rm -r",
        "git push --force",
        "mkdocs nosuch",
        "pip install -e '.[nonsense]'",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(command)
