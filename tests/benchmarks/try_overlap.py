"""An experiment: what hides LoRA behind the matrix products of a decode step, on a CUDA device.

    python tests/benchmarks/try_overlap.py --out docs/benchmarks/h200-overlap.json

The four projection groups of 32 Llama-2-7B layers at 8 rows, each layer with weights of its own,
in one CUDA graph a way; the graphs are replayed in turn. Ways: the products alone (cuBLAS, and
our kernel for few rows); shrink and expand behind them, on the same stream or with shrink on a
second one; product, shrink and expand in one launch (`fused_linear.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fused_linear import FusedLinear, Plan
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora.bench.provenance import provenance
from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.triton import expand as expand_module
from minilora.ops.triton.expand import expand
from minilora.ops.triton.launch import INTERPRETED, Routing
from minilora.ops.triton.shrink import shrink

LLAMA_2_7B: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 4096, 4096)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (11008, 11008)),
    "down": (11008, (4096,)),
}
SMALL = {"qkv": (512, (256, 256, 256)), "down": (512, (256,))}  # for the interpreter
RANK, SLOTS = 16, 4
PLANS = [
    Plan(32, 128, 1, 4, 4),
    Plan(32, 256, 1, 4, 3),
    Plan(32, 256, 1, 4, 4),
    Plan(64, 128, 1, 4, 4),
    Plan(64, 128, 2, 4, 4),
    Plan(64, 256, 2, 4, 3),
    Plan(16, 256, 1, 4, 4),
    Plan(32, 128, 2, 4, 4),
]


@dataclass
class Projection:
    """One base product and its adapters."""

    group: str
    base: FusedLinear
    x: torch.Tensor
    out: torch.Tensor


def routing_of(rows: int, adapters: int, device: str) -> Routing:
    """Deal the rows to the adapters in turn."""
    meta = KernelMeta(rows, SLOTS, device)
    slots = [row % adapters if adapters else -1 for row in range(rows)]
    meta.prepare(slots, rows, adapters)
    return Routing(*meta.tables)


def make(shapes: Mapping[str, Any], layers: int, rows: int, device: str) -> list[Projection]:
    """Return the projections of the layers, with random weights."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    made = []
    for _ in range(layers):
        for group, (width, outs) in shapes.items():
            weight = normal(sum(outs), width) / width**0.5
            a = [normal(SLOTS, RANK, width) / width**0.5 for _ in outs]
            b = [normal(SLOTS, out, RANK) for out in outs]
            out = torch.zeros(rows, sum(outs), dtype=dtype, device=device)
            made.append(Projection(group, FusedLinear(weight, a, b), normal(rows, width), out))
    return made


def alone(p: Projection, routing: Routing, active: int) -> None:
    """The base product."""
    torch.mm(p.x, p.base.weight.t(), out=p.out)


def serial(p: Projection, routing: Routing, active: int) -> None:
    """Base product, shrink, expand."""
    out = linear(p.x, p.base.weight)
    h = shrink(p.x, p.base.a, routing, None, active)
    expand(h, p.base.b, out, routing, None, active)
    p.out = out


def shrink_first(p: Projection, routing: Routing, active: int) -> None:
    """Shrink, base product, expand."""
    h = shrink(p.x, p.base.a, routing, None, active)
    out = linear(p.x, p.base.weight)
    expand(h, p.base.b, out, routing, None, active)
    p.out = out


def forked(side: torch.cuda.Stream) -> Callable[[Projection, Routing, int], None]:
    """Shrink on a second stream beside the base product, then expand."""

    def run(p: Projection, routing: Routing, active: int) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            h = shrink(p.x, p.base.a, routing, None, active)
        out = linear(p.x, p.base.weight)
        main.wait_stream(side)
        expand(h, p.base.b, out, routing, None, active)
        p.out = out

    return run


def fused(plans: Mapping[str, Plan]) -> Callable[[Projection, Routing, int], None]:
    """Everything in one launch."""

    def run(p: Projection, routing: Routing, active: int) -> None:
        p.base(p.x, p.out, routing.mapping, routing.active_ids, active, plans[p.group])

    return run


@contextmanager
def waiting_expand() -> Iterator[None]:
    """Launch expand as an ordinary kernel, not a programmatic dependent one."""
    with patch.object(expand_module, "launches_early", lambda device: False):
        yield


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Warm up, and capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def medians(replays: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Microseconds of each, replayed in turn."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            events[0].record()
            replay()
            events[1].record()
            events[1].synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def check(projections: list[Projection], plans: list[Plan], rows: int, device: str) -> None:
    """Compare every way with float64, for all numbers of adapters; raise where one is wrong."""
    for p in {p.group: p for p in projections}.values():
        for active in (0, 1, 3, 4):
            routing = routing_of(rows, active, device)
            right = reference(p, routing)
            limit = 2e-4 if INTERPRETED else 3e-2
            for plan in plans:
                for _ in range(2):
                    p.out.fill_(torch.nan)
                    fused({p.group: plan})(p, routing, active)
                    wrong = (p.out.double() - right).abs().max().item()
                    if not wrong < limit * right.abs().max().item():
                        raise SystemExit(f"{p.group}, {active} adapters, {plan}: off by {wrong}")
            if p.base.counters.any():
                raise SystemExit(f"{p.group}: the counters were not set back")


def reference(p: Projection, routing: Routing) -> torch.Tensor:
    """Return the layer's output in float64."""
    x = p.x.double()
    out = x @ p.base.weight.double().T
    for row, slot in enumerate(routing.mapping[: len(x)].tolist()):
        if slot >= 0:
            pairs = zip(p.base.a, p.base.b, strict=True)
            out[row] += torch.cat(
                [b[slot].double() @ (a[slot].double() @ x[row]) for a, b in pairs]
            )
    return out


def choose(projections: list[Projection], routing: Routing) -> tuple[dict[str, Plan], Any]:
    """Return the fastest plan of each group, and what was measured."""
    best, found = {}, {}
    for group in {p.group for p in projections}:
        some = [p for p in projections if p.group == group]
        graphs: dict[str, Callable[[], None]] = {
            "cublas": capture(lambda some=some: [alone(p, routing, 0) for p in some] and None)
        }
        for plan in PLANS:
            for ahead in (0, 2048):
                one = Plan(**{**asdict(plan), "ahead": ahead})
                if some[0].base.weight.shape[1] % (one.split * one.block_k):
                    continue
                run = fused({group: one})
                try:
                    graphs[repr(one)] = capture(
                        lambda some=some, run=run: [run(p, routing, 0) for p in some] and None
                    )
                except Exception as error:
                    print(group, one, type(error).__name__, str(error)[:80], flush=True)
        us = {name: time / len(some) for name, time in medians(graphs, 15).items()}
        bytes_ = some[0].base.weight.numel() * 2
        found[group] = {name: [round(t, 2), round(bytes_ / t / 1e6, 3)] for name, t in us.items()}
        for name, (t, rate) in sorted(found[group].items(), key=lambda line: line[1]):
            print(f"{group:8} {t:7.2f} us {rate:.3f} TB/s  {name}", flush=True)
        ours = {name: t for name, t in us.items() if name != "cublas"}
        best[group] = eval(min(ours, key=lambda name: ours[name]), {"Plan": Plan})
    return best, found


def compare(projections: list[Projection], plans: dict[str, Plan], rows: int) -> dict[str, Any]:
    """Replay all ways in turn; return microseconds and the ratio to the products alone."""
    replays = {}

    def add(name: str, way: Callable[[Projection, Routing, int], None], active: int) -> None:
        routing = routing_of(rows, active, "cuda")
        try:
            replays[name] = capture(lambda: [way(p, routing, active) for p in projections] and None)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:200], flush=True)

    side = torch.cuda.Stream()
    add("cublas", alone, 0)
    add("ours", fused(plans), 0)
    for active in (1, 4):
        add(f"serial, {active}", serial, active)
        add(f"shrink first, {active}", shrink_first, active)
        add(f"forked, {active}", forked(side), active)
        with waiting_expand():
            add(f"forked, expand waits, {active}", forked(side), active)
        add(f"one launch, {active}", fused(plans), active)
    us = medians(replays, 40)
    return {name: [round(t, 1), round(t / us["cublas"], 4)] for name, t in us.items()}


def main() -> None:
    """Check, choose plans, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        small = make(SMALL, 1, args.rows, "cpu")
        check(small, [Plan(32, 128), Plan(64, 128, 2), Plan(16, 256)], args.rows, "cpu")
        print("right, in Triton's interpreter")
        return
    result = provenance("cuda", " ".join(["python", *sys.argv]), "microseconds; ratio to cublas")
    projections = make(LLAMA_2_7B, 32, args.rows, "cuda")
    check(projections[:4], [PLANS[0], PLANS[4]], args.rows, "cuda")
    print("right", flush=True)
    plans, result["plans"] = choose(projections, routing_of(args.rows, 0, "cuda"))
    result["chosen"] = {group: repr(plan) for group, plan in plans.items()}
    result["ways"] = compare(projections, plans, args.rows)
    for name, (us, ratio) in result["ways"].items():
        print(f"{name:32} {us:8.1f} us {ratio:.4f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
