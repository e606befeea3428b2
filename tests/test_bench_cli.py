"""``minilora bench kernels`` on a CPU, and the page made from the GPU's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minilora.bench.lora_case import METHODS, Case
from minilora.cli import main
from minilora.testing.workloads import WORKLOADS, workload

ROOT = Path(__file__).parent.parent
QUICK = ["bench", "kernels", "--device", "cpu", "--repeats", "2", "--rank", "4"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    flags = ["--rows", "1", "8", "--adapters", "1", "4", "--out", str(out)]
    assert main([*QUICK, *flags]) == 0
    printed = capsys.readouterr().out
    assert "smollm2, float32, rank 4, 4 slots" in printed
    assert "gather bmm" in printed
    found = json.loads(out.read_text())
    assert found["shape"] == "smollm2"
    assert f"torch {torch.__version__}" in found["versions"]
    assert found["command"].startswith("minilora bench kernels --rows 1 8 --adapters 1 4 --work")
    assert main(found["command"].split()[1:]) == 0
    # 1 row cannot have 4 adapters: that line would be another's, under a wrong name
    assert [(row["rows"], row["adapters"]) for row in found["rows"]] == [(1, 1), (8, 1), (8, 4)]
    for row in found["rows"]:
        assert all(row[method] > 0 for method in METHODS if method != "atomic")
        assert row["atomic"] is None


def test_workloads_by_name(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    names = ["none", "base_mixed", "skewed"]
    flags = ["--rows", "8", "--adapters", "3", "--workload", *names, "--out", str(out)]
    assert main([*QUICK, *flags]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["workload"], row["adapters"]) for row in rows] == [
        ("none", 0),
        ("base_mixed", 3),
        ("skewed", 3),
    ]
    assert rows[0]["ours"] == 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_way_computes_the_same(name: str) -> None:
    """A baseline that does less than the ops do would look fast."""
    torch.manual_seed(0)
    case = Case(48, (24, 8, 8), workload(name, 9, 4), rank=4)
    _, out, _, _ = case.tensors[0]
    before = out.clone()
    results = []
    for method in ("ours", "adapter_loop", "gather_bmm"):
        out.copy_(before)
        results.append(getattr(case, method)().clone())
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    assert torch.equal(results[0], before) == (name == "none")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rows", "8", "0"], "--rows 0 must be 1 or more"),
        (["--rank", "0"], "--rank 0 must be"),
        (["--adapters", "5"], "--adapters 5 must be from 1 to --max-loras 4"),
        (["--workload", "even"], "'even' is not one of none, identical"),
        (["--device", "tpu"], "--device 'tpu' must be"),
        (["--out", "no/such/folder/x.json"], "a folder that exists"),
        pytest.param(["--device", "cuda"], "finds no CUDA device", marks=without_gpu),
        (["--tune", "--device", "cpu"], "it needs Triton and a CUDA device"),
        pytest.param(
            ["--tune", "--device", "auto"], "needs Triton and a CUDA device", marks=without_gpu
        ),
    ],
)
def test_one_sentence(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *flags]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("minilora bench: error: ")
    assert says in printed
    assert printed.count("\n") == 1


def test_help_imports_no_torch() -> None:
    code = "import sys, minilora.cli as c\ntry: c.main(['bench', 'kernels', '--help'])\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def test_the_page_is_what_the_json_says() -> None:
    script = ROOT / "docs" / "benchmarks" / "make_pages.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "benchmarks").glob("*.json")))
def test_a_committed_result_says_where_it_is_from(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    for field in ("machine", "versions", "date", "command", "unit"):
        assert isinstance(result.get(field), str), field
