"""``minilora bench kernels``: time the LoRA ops on this machine, beside other ways to do it.

The other measurements of ``minilora bench`` are in `bench_engine.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilora.cli import bench_engine
from minilora.cli.output_file import check_output
from minilora.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

SHAPES = ("llama-3.1-8b", "smollm2")
_MANY = ("rows", "adapters", "workload")
DTYPES = ("bfloat16", "float16", "float32")
_EXAMPLES = """examples:
  minilora bench kernels
  minilora bench kernels --rows 1 8 32 --adapters 1 4 --out kernels.json
  minilora bench kernels --workload skewed base_mixed --device cpu
  minilora bench kernels --tune --out minilora/ops/triton/configs/cuda90.json
"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    bench = commands.add_parser("bench", help="measure this machine")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    parser = kinds.add_parser(
        "kernels",
        help="time the LoRA ops beside other ways to do the same",
        description="Time shrink + expand for the four groups of projections of one layer. On a "
        "GPU, calls on several sets of weights are captured in one CUDA graph; on a CPU the "
        "plain bodies are called one after another.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_flags(parser)
    parser.set_defaults(run=run)
    bench_engine.add_to(kinds)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from_gpu = "llama-3.1-8b, bfloat16 on a GPU; smollm2, float32 on a CPU"
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="INT")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4], metavar="INT")
    parser.add_argument(
        "--workload",
        nargs="+",
        default=["distinct"],
        metavar="NAME",
        help="who uses which adapter: none, identical, distinct, uniform, zipf, skewed, base_mixed",
    )
    parser.add_argument("--shape", choices=SHAPES, help=f"default: {from_gpu}")
    parser.add_argument("--rank", type=int, default=16, metavar="INT")
    parser.add_argument("--max-loras", type=int, default=4, metavar="INT", help="adapter slots")
    parser.add_argument("--dtype", choices=DTYPES, help="default: see --shape")
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto"')
    parser.add_argument("--repeats", type=int, default=50, metavar="INT", help="of each timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here as well")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="search the launches of this GPU and print a table for minilora/ops/triton/configs",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON; or tune."""
    _check(args)
    found = _tuned(args) if args.tune else _measured(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    elif args.tune:
        print(json.dumps(found, indent=2))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before torch is imported."""
    for name in ("rank", "max_loras", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be 1 or more")
    if min(args.rows) < 1:
        raise ConfigError(f"--rows {min(args.rows)} must be 1 or more")
    if not 1 <= min(args.adapters) <= max(args.adapters) <= args.max_loras:
        wrong = next(n for n in args.adapters if not 1 <= n <= args.max_loras)
        raise ConfigError(f"--adapters {wrong} must be from 1 to --max-loras {args.max_loras}")
    check_output("--out", args.out)


def _device(name: str) -> str:
    """Return "cuda" or "cpu"."""
    import torch

    from minilora.ops.triton import HAS_TRITON

    gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if gpu and HAS_TRITON else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} must be 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not gpu:
        raise ConfigError("--device cuda, but torch finds no CUDA device; use --device cpu")
    if name == "cuda" and not HAS_TRITON:
        raise ConfigError("--device cuda needs Triton, which is not installed; pip install triton")
    return name


def _tuned(args: argparse.Namespace) -> dict[str, Any]:
    if _device(args.device) != "cuda":
        raise ConfigError(
            "--tune searches the launches of Triton kernels; it needs Triton and a CUDA device"
        )
    from minilora.bench.tune import tune

    return tune()


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from rich.console import Console

    from minilora.bench.provenance import provenance

    device = _device(args.device)
    shape, dtype = _defaults(args, device)
    console = Console()
    unit = "microseconds of the LoRA of one layer, all four groups of projections"
    options = {"shape": shape, "dtype": dtype, "rank": args.rank, "max_loras": args.max_loras}
    made = provenance(device, _command(args, {**options, "device": device}), unit)
    console.print(
        f"{made['machine']}, {made['versions']}, {shape}, {dtype}, rank {args.rank}, "
        f"{args.max_loras} slots"
    )
    rows = list(_rows(args, shape, device, getattr(torch, dtype)))
    if not rows:
        raise ConfigError(
            f"--rows {args.rows} and --adapters {args.adapters} leave nothing to measure; "
            "a batch has at most one adapter a row"
        )
    console.print(_table(rows))
    return {**made, **options, "repeats": args.repeats, "rows": rows}


def _defaults(args: argparse.Namespace, device: str) -> tuple[str, str]:
    """Return shape and dtype."""
    usual = ("llama-3.1-8b", "bfloat16") if device == "cuda" else ("smollm2", "float32")
    return args.shape or usual[0], args.dtype or usual[1]


def _command(args: argparse.Namespace, options: Mapping[str, object]) -> str:
    """Return the command that makes these figures again, with every default written out."""
    many = {name: " ".join(map(str, getattr(args, name))) for name in _MANY}
    flags = {**many, **options, "repeats": args.repeats}
    text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    return f"minilora bench kernels {text}"


def _rows(
    args: argparse.Namespace, shape: str, device: str, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """One row a workload: the microseconds of one layer, by method."""
    from minilora.bench.lora_case import layer
    from minilora.testing.workloads import workload

    for name in args.workload:
        for rows in args.rows:
            for adapters in args.adapters:
                slots = workload(name, rows, adapters)
                real = len(set(slots) - {-1})
                if real != adapters and name == "distinct":
                    continue  # fewer rows than adapters: another line of the table has it
                times = layer(
                    slots,
                    shape=shape,
                    rank=args.rank,
                    max_loras=args.max_loras,
                    dtype=dtype,
                    device=device,
                    repeats=args.repeats,
                )
                layers = {
                    method: None if us is None else round(sum(us.values()), 1)
                    for method, us in times.items()
                }
                yield {"workload": name, "rows": rows, "adapters": real, **layers}


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    names = list(rows[0])
    table = Table(*(name.replace("_", " ") for name in names), title="µs of one layer")
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in names))
    return table
