"""``minilora verify`` and ``minilora inspect``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora.cli import main
from minilora.cli.report_html import short_name
from minilora.ops.kernel_meta import KernelMeta
from minilora.testing import make_tiny_llama
from tests.test_broken_graphs import count_no_lora_as_a_group

QUICK = ["verify", "--path", "recorded FULL", "--workload", "counts", "--device", "cpu"]


def test_all_right_with_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "report.html"
    assert main([*QUICK, "--capture-sizes", "1", "4", "9", "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"recorded FULL +counts +\d+ +\d+ +0 +\d\.\de-\d+  right", printed)
    assert "compared bit for bit: all right." in printed
    page = html.read_text()
    assert not re.search(r"(src|href)=|https?://|@import", page), "asks another host"
    assert page.count('<li class="lora"') > 0
    first, second = re.findall(r"(\d+) launches, (\d+) of them LoRA", page)
    assert int(first[1]) == 0 < int(second[1])
    # The look-up of an embedding's adapter is plain PyTorch, so it is not marked.
    assert int(second[0]) - int(second[1]) >= int(first[0])
    assert "FULL, 9 rows" in page


def test_a_fault_is_named_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelMeta, "write", count_no_lora_as_a_group)
    assert main(QUICK) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "the routing tables do not describe the step" in printed
    assert "NOT right" in printed


def test_a_checkpoint_and_its_adapters(
    tiny_llama: Path, tiny_adapter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_adapter("verify", r=4)
    flags = ["--model", str(tiny_llama), "--lora", f"a={folder}", "--num-kv-blocks", "64"]
    assert main([*QUICK, *flags]) == 0
    assert "graphs of [1, 2, 8] rows" in capsys.readouterr().out


def test_a_model_without_adapters(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "m", num_hidden_layers=1)
    flags = ["--model", str(model), "--num-kv-blocks", "64", "--html", str(tmp_path / "r.html")]
    assert main([*QUICK, *flags]) == 0
    assert "launches, 0 of them LoRA" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["verify", "--path", "CUDA"], "there is no path 'CUDA'; known here: "),
        (["verify", "--workload", "some"], "there is no workload 'some'"),
        (["verify", "--lora", "a=b"], "--lora needs --model"),
        (["verify", "--model", "m", "--lora", "a"], "--lora 'a' must be NAME=DIR"),
        (["verify", "--model", "m", "--lora", "a=b", "--lora", "a=c"], "'a' is given twice"),
        (["verify", "--html", "/no/such/folder/r.html"], "a folder that exists"),
        (["verify", "--capture-sizes", "4", "2"], "sizes must ascend"),
        (["inspect", "--graph", "cuda", "--device", "cpu"], "graph='recorded'"),
        (["inspect", "--max-graph-memory", "-1"], "max_graph_memory=-1"),
    ],
)
def test_bad_flags(flags: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert match in error
    assert len(error.strip().splitlines()) == 1


def test_inspect(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", "--graph", "recorded", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"graphs \(recorded\): \d+ graphs in [\d.]+ s", printed)
    assert "run FULL with 4 rows (1 padding) and 2 groups" in printed
    assert re.search(r"token_lora_mapping\W+\[0, -1, 1, -1\]", printed)
    assert re.search(r"rank-5\W+5\W+1\W", printed)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--max-loras", "1"], "the last step: 1 rows, run FULL with 1 rows (0 padding)"),
        (["--max-model-len", "6"], "the last step: 3 rows, run FULL with 4 rows (1 padding)"),
    ],
)
def test_inspect_counts_the_rows_of_its_step(
    flags: list[str], found: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # --device says what is used
    assert main(["inspect", "--device", "cpu", *flags]) == 0
    assert found in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_faulty_adapter_is_refused_before_anything_is_shown(
    command: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(tiny_llama), "--lora", f"a={tmp_path}", "--num-kv-blocks", "64"]
    assert main([command, "--device", "cpu", *flags]) == 1
    printed = capsys.readouterr()
    assert "adapter_config.json" in printed.err
    assert "NONE" not in printed.out
    assert "right" not in printed.out


def test_short_names_of_kernels() -> None:
    long = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>"
    )
    assert len(short_name(long)) <= 60
    assert "<" not in short_name(long)
    assert short_name("_shrink_kernel") == "_shrink_kernel"
    assert short_name("aten::mm") == "aten::mm"
