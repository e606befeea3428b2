"""``minilora bench latency | throughput | serve | compare`` on a tiny checkpoint."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minilora import LLM
from minilora.bench.latency import measure, summary
from minilora.bench.plot import bars
from minilora.bench.serve import serve
from minilora.bench.setup import Setup, fixed_length, make_setup, refuse_short
from minilora.cli import main
from minilora.config.errors import ConfigError
from minilora.testing.shapes import SHAPES, make_shape

ENGINE = [
    "--device", "cpu", "--num-kv-blocks", "64", "--max-model-len", "64", "--max-num-seqs", "8",
    "--rank", "4", "--input-len", "5", "--output-len", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def setup(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("bench")
    return make_setup(folder, shape=None, model=str(tiny_llama), adapters=3, rank=4)


def engine(setup: Setup) -> LLM:
    return setup.llm(device="cpu", num_kv_blocks=64, max_model_len=64, max_num_seqs=8)


@pytest.mark.parametrize(
    ("kind", "flags", "cases"),
    [
        ("latency", ["--adapters", "2", "--iterations", "3"], ["batch"]),
        ("throughput", ["--num-prompts", "5"], ["all at once"]),
        ("serve", ["--adapters", "3", "--num-prompts", "4", "--concurrency", "1", "3"], ["1", "3"]),
        ("compare", ["--adapters", "1", "3", "--iterations", "2"],
         ["off", "idle", "1 adapters", "3 adapters"]),
    ],
)  # fmt: skip
def test_the_command(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    flags: list[str],
    cases: list[str],
) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    files = ["--model", str(tiny_llama), "--out", str(out), "--svg", str(svg)]
    assert main(["bench", kind, *flags, *ENGINE, *files]) == 0
    assert f"bench {kind}" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert list(found["results"]) == cases
    assert "torch" in found["versions"]
    texts = [element.text for element in ElementTree.fromstring(svg.read_text()).iter()]
    assert set(cases) <= set(texts)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["latency", "--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["serve", "--concurrency", "2", "0"], "--concurrency 0 must be 1 or more"),
        (["compare", "--adapters", "0", "2"], "--adapters 0 must be 1 or more"),
        (["throughput", "--adapters", "-1"], "--adapters -1 must be 0 or more"),
        (
            ["latency", "--out", "/no/such/folder/x.json"],
            "x.json' must be a file",
        ),
        (["latency", "--svg", "/"], "--svg '/' must be a file"),
        (["latency", "--batch-size", "2", "--adapters", "3"], "3 are more than --batch-size 2"),
        (["compare", "--adapters", "1", "9"], "--adapters 9 are more than --batch-size 8"),
        (["throughput", "--num-prompts", "1", "--adapters", "2"], "more than --num-prompts 1"),
        (["latency", *ENGINE, "--output-len", "60"], "are more than max_model_len=64 together"),
        (["serve", *ENGINE, "--input-len", "60"], "--input-len 60 and --output-len 6 are more"),
    ],
)
def test_bad_numbers(flags: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 1
    assert match in capsys.readouterr().err


def test_an_answer_that_ends_early_is_no_measurement(setup: Setup) -> None:
    output = engine(setup).generate([[5]], fixed_length(3), progress=False)
    refuse_short(output, 3)
    with pytest.raises(RuntimeError, match="ended early: length"):
        refuse_short(output, 4)


def test_runs_are_measured_in_turn() -> None:
    order: list[str] = []
    runs: dict[str, Callable[[], None]] = {n: lambda n=n: order.append(n) for n in "ab"}  # type: ignore[misc]
    seconds = measure(runs, iterations=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert [len(times) for times in seconds.values()] == [3, 3]


def test_percentiles() -> None:
    found = summary([float(n) for n in range(101)])
    assert found["percentiles"] == {"10": 10, "25": 25, "50": 50, "75": 75, "90": 90, "99": 99}
    assert (found["average"], found["samples"]) == (50, 101)
    assert summary([1.0, 4.0])["percentiles"]["50"] == 2.5, "the median of an even number"


def test_serving_keeps_so_many_in_flight(setup: Setup, monkeypatch: Any) -> None:
    llm, most = engine(setup), [0]
    step = llm.step

    def counted() -> Any:
        most[0] = max(most[0], len(llm.scheduler.running) + len(llm.scheduler.waiting))
        return step()

    monkeypatch.setattr(llm, "step", counted)
    found = serve(llm, setup.loras, 3, 7, input_len=5, output_len=6)
    assert most == [3]
    assert 0 < found["tpot_median_s"] < found["ttft_p99_s"] + 1
    assert not llm.has_unfinished_requests()


def test_a_plot_escapes_its_names() -> None:
    assert ElementTree.fromstring(bars({"a < b & c": 1.0, "none": 0.0}, "t", "ms")) is not None


def test_shapes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape 'gpt' is not known; known: 'llama-2-7b'"):
        make_shape(tmp_path, "gpt")
    for name in SHAPES:
        assert (make_shape(tmp_path / name, name) / "config.json").is_file()
    folder = make_shape(tmp_path / "small", "smollm2", num_hidden_layers=1)
    llm = LLM(folder, load_format="dummy", device="cpu", num_kv_blocks=4)
    output = llm.generate([[1, 2, 3]], progress=False)[0]
    assert output.error is None
