"""The tutorials teach what is true: the check of a tutorial fails when its lesson is undone.

Also the renderer: cells, outputs, figures, notebooks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cells import read_cells
from diagrams import DIAGRAMS, diagram, svg_file
from render import notebook, page, result_of, tutorial_paths

ROOT = Path(__file__).resolve().parents[2]

# tutorial: a line of it, and what undoes its lesson
SABOTAGES: dict[str, tuple[str, str]] = {
    "01_lora_in_ten_lines": (
        "y = x @ W.T  # [T, out], every row at once",
        'y = x @ merged["A"].T  # one adapter for all',
    ),
    "02_one_batch_many_adapters": (
        "gathered = torch.where((slots >= 0)[:, None], base + update, base)",
        "gathered = base + update",
    ),
    "03_shrink_and_expand_kernels": (
        "        h_tile += split * num_tokens * R  # a place of its own for each split",
        "        h_tile += 0 * num_tokens * R  # one place for all splits",
    ),
    "04_a_graph_recorder": (
        "fresh.copy_(out)  # at the old address",
        "pass  # new memory at each replay",
    ),
    "05_padding_garbage": (
        "    slot_mapping.copy_(torch.tensor(slots + padding))",
        "    slot_mapping[: len(slots)] = torch.tensor(slots)",
    ),
    "06_buffers_that_must_be_reset": (
        "    h.zero_()\n    shrink_adding()",
        "    shrink_adding()",
    ),
    "07_a_second_set_of_graphs": (
        "    return two_sets.runner.graphs[base_graph].replay()",
        "    return plain_replay(key, step)",
    ),
    "09_one_decode_step": (
        "    position = int(step.positions[row])",
        "    position = 0",
    ),
    "12_measuring_honestly": (
        "    return statistics.median(measure(B) / measure(A) for _ in range(100))",
        "    return in_blocks(seed)",
    ),
    "08_graphs_by_number_of_adapters": (
        "    return sorted(set(slots) - {-1})",
        "    return sorted(set(slots))",
    ),
    "10_torch_compile": (
        'active["num_loras"] = 1  # later an adapter comes',
        'active["num_loras"] = 0  # none ever comes',
    ),
}
UNTOUCHED = {"11_train_two_adapters", "13_bring_your_own_kernel"}  # they take long


def test_no_tutorial_is_forgotten() -> None:
    assert {path.stem for path in tutorial_paths()} == {*SABOTAGES} | UNTOUCHED


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_check_fails_without_its_lesson(name: str, tmp_path: Path) -> None:
    path = ROOT / "tutorials" / f"{name}.py"
    old, new = SABOTAGES[name]
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    broken = tmp_path / path.name
    broken.write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, str(broken)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "AssertionError" in ran.stderr


def test_every_tutorial_has_its_parts() -> None:
    names = [path.stem[:2] for path in tutorial_paths()]
    assert names == [f"{number:02}" for number in range(1, 14)]
    for path in tutorial_paths():
        first, *_, last = read_cells(path)
        text = path.read_text(encoding="utf-8")
        assert first.markdown, path
        assert last.markdown, path
        assert first.text.startswith(f"# {int(path.stem[:2])}. "), path
        for part in ("**You will learn**", "**You need**", "\n# ## Check\n", "\nassert "):
            assert part in text, f"{path.name} has no {part!r}"


EXAMPLE = '''"""Left out."""
# %% [markdown]
# # A title
#
# Text with `code`.

# %%
import inspect

import matplotlib.pyplot as plt


def double(x):
    return 2 * x


print(inspect.getsource(double).strip())
double(21)

# %%
plt.plot([1, 2], label="a")
plt.show()
'''


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("render.ROOT", tmp_path)
    monkeypatch.setattr("render.CACHE", tmp_path / "cache")
    path = tmp_path / "tutorials" / "01_example.py"
    path.parent.mkdir()
    path.write_text(EXAMPLE)
    return path


def test_a_page_has_texts_code_outputs_and_figures(example: Path) -> None:
    result = result_of(example)
    text = page(example, result)
    assert text.startswith('# A title\n\nText with `code`.\n\n<p class="downloads">')
    assert "``` { .text .output }\ndef double(x):\n    return 2 * x\n42\n```" in text
    assert text.count("<svg") == 1
    assert "currentColor" in text
    assert "Left out" not in text


def test_a_figure_is_the_same_bytes_in_every_run(example: Path) -> None:
    first = result_of(example)
    for kept in example.parents[1].glob("cache/*.json"):
        kept.unlink()
    assert result_of(example)["cells"] == first["cells"]


def test_a_result_is_kept_until_the_tutorial_changes(example: Path) -> None:
    result_of(example)
    (kept,) = example.parents[1].glob("cache/*.json")
    kept.write_text(json.dumps({"cells": [], "seconds": 0}))
    assert result_of(example)["cells"] == []
    example.write_text(EXAMPLE + "\n# %%\nprint('more')\n")
    assert result_of(example)["cells"][-1]["stdout"] == "more\n"


def test_a_failing_tutorial_shows_its_own_line(example: Path) -> None:
    example.write_text("# %% [markdown]\n# Text\n\n# %%\nx = 1\nassert x == 2, 'not so'\n")
    with pytest.raises(RuntimeError, match=r'01_example\.py", line 6(.|\n)*not so'):
        result_of(example)


def test_code_in_a_text_cell_is_refused(example: Path) -> None:
    example.write_text("# %% [markdown]\n# Text\nprint(1)\n")
    with pytest.raises(ValueError, match=r"01_example\.py, line 3: a text cell"):
        read_cells(example)


def test_a_notebook_has_the_same_cells(example: Path) -> None:
    book = json.loads(notebook(result_of(example)))
    assert [cell["cell_type"] for cell in book["cells"]] == ["markdown", "markdown", "code", "code"]
    assert "".join(book["cells"][1]["source"]) == "# A title\n\nText with `code`."


def test_the_readme_s_figure_is_the_diagram() -> None:
    file = (ROOT / "docs" / "assets" / "one-batch.svg").read_text(encoding="utf-8")
    texts = re.compile(r"<text[^>]*>([^<]*)</text>")
    assert texts.findall(file) == texts.findall(svg_file("one-batch"))


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_the_same_bytes_in_every_run(name: str) -> None:
    assert diagram(name) == diagram(name)
