"""``minilora verify``: run the harness on every path of this machine, and say what it found."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilora.cli.made import TINY_OPTIONS, best_graph, make_tiny, parse_loras
from minilora.cli.options import add_flags, given
from minilora.cli.output_file import check_output
from minilora.config.engine import EngineConfig

if TYPE_CHECKING:
    from minilora.engine.llm import LLM
    from minilora.testing.parity import ParityReport, ParityRow

_WORKLOADS = ["none", "base_mixed", "zipf", "counts", "shuffle", "long"]
_QUICK = ["none", "base_mixed", "counts"]
_SMALL_SIZES = [1, 2, 8]  # of a real checkpoint, unless others are asked for
# Every step is run five times, from copies of the whole KV pool.
_OF_A_CHECKPOINT: dict[str, Any] = {
    "capture_sizes": _SMALL_SIZES,
    "max_num_seqs": 8,
    "num_kv_blocks": 128,
}
_LEFT_OUT = {
    *("model", "enable_lora", "graph", "graph_mode", "compile"),  # the paths set them
    "load_format",  # the oracle reads the files
    "async_scheduling",  # steps are checked one by one, so none is launched ahead
}
_HEAD = ("path", "workload", "steps", "replays", "vs eager", "vs oracle")
_WIDTHS = (20, 11, 6, 8, 10, 10)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="check every path of this machine bit for bit",
        description="Serve named workloads eagerly and from recorded and CUDA graphs. Each step is "
        "run again eagerly, replayed twice, and replayed with poison in everything it must not "
        "read; all must be the same bits, and the logits close to an oracle's. The exit code says "
        "whether all is right.",
    )
    parser.add_argument("--model", metavar="DIR", help="a checkpoint (default: a tiny made one)")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME=DIR", help="an adapter (repeatable)"
    )
    parser.add_argument(
        "--path",
        action="append",
        metavar="NAME",
        help='only this path, such as "recorded FULL" (repeatable; default: all of this machine)',
    )
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help=f"only this workload (repeatable; default: {', '.join(_WORKLOADS)})",
    )
    parser.add_argument("--quick", action="store_true", help="fewer workloads")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the details")
    add_flags(parser, "engine", EngineConfig, _LEFT_OUT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, print a row as soon as it is done, and write the page."""
    check_output("--html", args.html)
    args.device = getattr(args, "device", "auto")
    adapters = parse_loras(args.lora, args.model)
    with tempfile.TemporaryDirectory(prefix="minilora-verify-") as name:
        model = args.model
        if model is None:
            model, adapters = make_tiny(Path(name))
        return _verify(args, model, adapters)


def _verify(args: argparse.Namespace, model: str, adapters: dict[str, str]) -> int:
    from rich.console import Console

    from minilora.testing.parity import PATHS, available_paths, run_parity

    console = Console()
    options = _options(args, adapters)
    if args.model and "capture_sizes" not in given(args, EngineConfig):
        console.print(f"graphs of {_SMALL_SIZES} rows; --capture-sizes takes others")
    here = available_paths(args.device)
    report = run_parity(
        _factory(model, options, adapters),
        args.path or here,
        args.workload or (_QUICK if args.quick else _WORKLOADS),
        adapters=adapters,
        on_row=_row_printer(console),
    )
    _print_verdict(console, report)
    if not args.path and len(here) < len(PATHS):
        others = ", ".join(name for name in PATHS if name not in here)
        console.print(f"not checked, for want of a CUDA device: {others}", highlight=False)
    if args.html:
        from minilora.cli.report_html import page

        graph = best_graph(args.device)
        llm = _factory(model, options, adapters)(graph=graph, graph_mode="full_and_piecewise")
        args.html.write_text(page(report, llm), encoding="utf-8")
        console.print(f"wrote {args.html}")
    return 0 if report.ok else 1


def _options(args: argparse.Namespace, adapters: dict[str, str]) -> dict[str, Any]:
    asked = given(args, EngineConfig, _LEFT_OUT)
    if args.model is None:
        return {"enable_lora": True, **TINY_OPTIONS, **asked}
    return {"enable_lora": bool(adapters), **_OF_A_CHECKPOINT, **asked}


def _factory(model: str, options: dict[str, Any], adapters: dict[str, str]) -> Callable[..., LLM]:
    def make(**path: str) -> LLM:
        from minilora.engine.llm import LLM

        compiled = "none" if path["graph"] == "recorded" else "auto"
        llm = LLM(model, **{**options, **path, "compile": compiled})
        for name, folder in adapters.items():  # a faulty one is refused before anything runs
            llm.load_adapter(name, folder)
            llm.unload_adapter(name)
        return llm

    return make


def _cells(row: ParityRow) -> tuple[str, ...]:
    eager = "-" if not row.replays else f"{row.eager_error:g}"
    oracle = "-" if row.oracle_error is None else f"{row.oracle_error:.1e}"
    return row.path, row.workload, str(row.steps), str(row.replays), eager, oracle


def _row_printer(console: Any) -> Callable[[ParityRow], None]:
    """Return what prints each row, and the head above the first."""
    head = [_HEAD]

    def show(row: ParityRow) -> None:
        if head:
            _print_row(console, head.pop(), "verdict")
        _print_row(console, _cells(row), "right" if row.ok else "WRONG")

    return show


def _print_row(console: Any, cells: tuple[str, ...], verdict: str) -> None:
    """Print one line; a table that is only shown when all is done would look like a hang."""
    text = " ".join(
        cell.ljust(width) if index < 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    style = {"verdict": "bold", "WRONG": "red"}.get(verdict)
    console.print(f"{text}  {verdict}", style=style, highlight=False, soft_wrap=True)


def _print_verdict(console: Any, report: ParityReport) -> None:
    for row in report.rows:
        for fault in row.faults:
            console.print(f"{row.path}, {row.workload}: {fault}", highlight=False, soft_wrap=True)
    steps = sum(row.steps for row in report.rows)
    replays = sum(row.replays for row in report.rows)
    verdict = "all right" if report.ok else "NOT right"
    compared = f"{replays} of them replayed and compared bit for bit"
    if not replays:
        compared = "none of them from a graph, so nothing was compared bit for bit"
    console.print(f"{steps} steps, {compared}: {verdict}.", soft_wrap=True)
