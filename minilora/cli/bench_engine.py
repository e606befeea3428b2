"""``minilora bench latency | throughput | serve | compare``: time a whole engine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilora.cli.options import add_flags, given
from minilora.cli.output_file import check_output
from minilora.config.engine import EngineConfig
from minilora.config.errors import ConfigError

if TYPE_CHECKING:
    from minilora.bench.setup import Setup

_SHAPES = ("llama-2-7b", "llama-3.1-8b", "smollm2")
_OURS = {"model", "enable_lora", "load_format", "max_lora_rank"}
_KINDS = {
    "latency": "seconds of one batch: average and percentiles",
    "throughput": "requests and tokens a second with everything queued at once",
    "serve": "time to the first token, per token, and tokens a second by requests in flight",
    "compare": "LoRA off, idle, and several numbers of adapters, in turn in one run, as ratios",
}
_UNIT = {
    "latency": "seconds of one batch, from prompt to last token",
    "throughput": "tokens and requests a second",
    "serve": "tokens a second; seconds to the first token (TTFT) and per token (TPOT)",
    "compare": "seconds of one batch, from prompt to last token; over_off: a ratio of medians",
}
_HEADS = {"latency": "ms", "compare": "ms", "throughput": "", "serve": "in flight; times in ms"}
_MS = 1e3


def add_to(kinds: Any) -> None:
    """Add the four measurements to ``minilora bench``."""
    for kind, text in _KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=f"Measure {text}.")
        _add_flags(parser, kind)
        add_flags(parser, "engine", EngineConfig, _OURS)
        parser.set_defaults(run=run)


def _add_flags(parser: argparse.ArgumentParser, kind: str) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=_SHAPES, help="random weights (default: smollm2)")
    what.add_argument("--model", metavar="DIR", help="a checkpoint instead of a shape")
    several = kind == "compare"
    parser.add_argument(
        "--adapters",
        type=int,
        nargs="+" if several else None,
        default=None if several else 0,
        metavar="INT",
        help="random adapters on all seven projections"
        + (", one case each (default: 1 2 4 8, as far as the batch has rows)" if several else ""),
    )
    parser.add_argument("--rank", type=int, default=16, metavar="INT", help="of the adapters")
    batch = {"batch-size": 8, "iterations": 10}
    queue = {"num-prompts": 64}
    own = queue if kind in ("throughput", "serve") else batch
    for name, default in {"input-len": 32, "output-len": 128, **own}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT")
    if kind == "serve":
        parser.add_argument(
            "--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], metavar="INT"
        )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot here as well")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON and a plot."""
    _check(args)
    with tempfile.TemporaryDirectory(prefix="minilora-bench-") as name:
        from minilora.bench.setup import make_setup

        shape = args.shape or (None if args.model else "smollm2")
        adapters = max(args.adapters) if args.bench == "compare" else args.adapters
        setup = make_setup(
            Path(name), shape=shape, model=args.model, adapters=adapters, rank=args.rank
        )
        found = _measured(args, setup)
    _show(args, found)
    return 0


def _check(args: argparse.Namespace) -> None:
    numbers = {**vars(args), "adapters": args.adapters}
    for name in ("rank", "input_len", "output_len", "batch_size", "iterations", "num_prompts"):
        if name in numbers and numbers[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {numbers[name]} must be 1 or more")
    _check_adapters(args)
    if args.bench == "serve" and min(args.concurrency) < 1:
        raise ConfigError(f"--concurrency {min(args.concurrency)} must be 1 or more")
    check_output("--out", args.out)
    check_output("--svg", args.svg)


def _check_adapters(args: argparse.Namespace) -> None:
    """Refuse more adapters than there are rows to use them, and choose those of `compare`."""
    rows = {name: getattr(args, name, None) for name in ("batch_size", "num_prompts")}
    flag, most = next((name, count) for name, count in rows.items() if count is not None)
    if args.bench == "compare" and args.adapters is None:
        args.adapters = [n for n in (1, 2, 4, 8) if n <= most]
    least, counts = (1, args.adapters) if args.bench == "compare" else (0, [args.adapters])
    if min(counts) < least:
        raise ConfigError(f"--adapters {min(counts)} must be {least} or more")
    if max(counts) > most and args.bench != "serve":  # which draws them: some may go unused
        raise ConfigError(
            f"--adapters {max(counts)} are more than --{flag.replace('_', '-')} {most} has rows for"
        )


def _measured(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """Return the figures by case."""
    from minilora.bench import latency, serve

    options = given(args, EngineConfig, _OURS)
    if args.bench == "compare":
        batch = {n: getattr(args, n) for n in ("batch_size", "input_len", "output_len")}
        return latency.compare(setup, args.adapters, args.iterations, options, **batch)
    llm = setup.llm(enable_lora=bool(setup.loras), **options)
    lengths = args.input_len, args.output_len
    if args.bench == "latency":
        one = latency.batch(llm, setup.loras, args.batch_size, *lengths)
        times = latency.measure({"batch": one}, args.iterations)
        return {"batch": latency.summary(times["batch"])}
    if args.bench == "throughput":
        return {"all at once": serve.throughput(llm, setup.loras, args.num_prompts, *lengths)}
    serve.serve(llm, setup.loras, 1, 2, *lengths)  # warm-up
    return {
        str(c): serve.serve(llm, setup.loras, c, max(c, args.num_prompts), *lengths)
        for c in args.concurrency
    }


def _show(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from minilora.bench.plot import bars
    from minilora.bench.provenance import provenance

    rows = {name: _figures(one) for name, one in found.items()}
    made = provenance(getattr(args, "device", "auto"), _command(), _UNIT[args.bench])
    title = f"bench {args.bench}: {made['machine']}, {made['versions']}"
    table = Table(_HEADS[args.bench], *next(iter(rows.values())), title=title)
    for name, figures in rows.items():
        table.add_row(name, *(f"{value:.4g}" for value in figures.values()))
    Console().print(table)
    if args.out:
        text = json.dumps({**made, "results": found}, indent=2)
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.svg:
        column = "tokens/s" if args.bench in ("throughput", "serve") else "p50"
        values = {name: figures[column] for name, figures in rows.items()}
        unit = column if "/" in column else f"{column}, ms"
        args.svg.write_text(bars(values, f"bench {args.bench}", unit), encoding="utf-8")


def _command() -> str:
    return " ".join(["minilora", *sys.argv[1:]])


def _figures(one: Mapping[str, Any]) -> dict[str, float]:
    """Return one case's figures by column, seconds as milliseconds."""
    if "percentiles" in one:
        percentiles = {f"p{p}": s * _MS for p, s in one["percentiles"].items()}
        over = {"over off": one["over_off"]} if "over_off" in one else {}
        return {"mean": one["average"] * _MS, **percentiles, **over}
    if "ttft_median_s" in one:
        times = {
            f"{name.upper()} {p}": one[f"{name}_{p}_s"] * _MS
            for name in ("ttft", "tpot")
            for p in ("median", "p99")
        }
        return {"tokens/s": one["tokens_per_s"], **times}
    return {"tokens/s": one["tokens_per_s"], "requests/s": one["requests_per_s"]}
