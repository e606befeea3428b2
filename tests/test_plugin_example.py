"""The pages on graphs do what they say: their code runs and prints what is printed there.

docs/harness.md checks two layers that are not ours with the pytest plugin. They are taken from the
page and tested in a pytest of their own: the harness names the faults, and the mended ones pass.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r'```python title="([^"]*)"\n(.*?)```\n(?:\n```text\n(.*?)```\n)?', re.DOTALL)
PAGES = ("invariant", "dispatch", "harness")
BLOCKS = {
    f"{page}: {title}": (title, code, printed)
    for page in PAGES
    for title, code, printed in BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
}


def test_no_block_is_left_out() -> None:
    for page in PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert text.count("```python") == sum(name.startswith(page) for name in BLOCKS)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "my_layers" not in name])
def test_a_block_prints_what_the_page_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    title, code, printed = BLOCKS[name]
    exec(compile(code, title, "exec"), {"__name__": title.removesuffix(".py")})
    assert capsys.readouterr().out == printed


def run_the_example(pytester: pytest.Pytester, layers: str) -> pytest.RunResult:
    for name, title in (("my_layers.py", layers), ("test_my_layers.py", "test_my_layers.py")):
        code = BLOCKS[f"harness: {title}"][1]
        (pytester.path / name).write_text(code, encoding="utf-8")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_faulty_layers_that_are_not_ours(pytester: pytest.Pytester) -> None:
    result = run_the_example(pytester, "my_layers.py")
    tests = sum(result.parseoutcomes().values())
    result.assert_outcomes(failed=tests)
    page = (DOCS / "harness.md").read_text(encoding="utf-8")
    named = [line for line in result.outlines if line.startswith("E ") and "FaultFound" in line]
    assert len(named) == 2 * tests // 3, "two of three tests use the harness"
    assert any("a buffer is not reset inside the graph" in line for line in named)
    assert any("what is in padding reaches real rows" in line for line in named)
    for line in named:
        assert re.sub(r" +", " ", line) in re.sub(r" +", " ", page)


def test_the_mended_layers_pass(pytester: pytest.Pytester) -> None:
    result = run_the_example(pytester, "my_layers.py, mended")
    result.assert_outcomes(passed=sum(result.parseoutcomes().values()))
    assert result.ret == 0


def test_the_backend_is_a_fixture_like_any_other(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_by_name(request):
            assert request.getfixturevalue("graph_backend") == "recorded"

        def test_in_turn(graph_backend):
            assert graph_backend in ("recorded", "cuda")

        @pytest.mark.parametrize("graph_backend", ["recorded"])
        def test_of_one_s_own(graph_backend, parity):
            assert parity.backend == "recorded"
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert not result.parseoutcomes().get("failed")
    listed = pytester.runpytest_inprocess("--fixtures", "-p", "no:cacheprovider")
    listed.stdout.fnmatch_lines(["graph_backend*"])
