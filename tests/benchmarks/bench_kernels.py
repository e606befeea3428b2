"""Measure the LoRA kernels on this machine's GPU: ``python tests/benchmarks/bench_kernels.py``.

Prints the tables of `docs/` and writes them as JSON. ``--tune`` prints a new table of launch
configurations instead (for `minilora/ops/triton/configs/`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora.bench.lora_case import SHAPES, Case
from minilora.bench.lora_case import layer as measure_layer
from minilora.bench.provenance import provenance
from minilora.bench.tune import tune

UNIT = (
    "microseconds; Llama-3.1-8B, bfloat16, rank 16, as many slots as adapters and at least 4; 16 "
    "weight sets in one CUDA graph, median of 50 replays / 16 (prefill: of 20, gather + einsum 5; "
    "both ways of PyTorch with 2 weight sets)"
)
# (rows, adapters): microseconds of one layer that we aimed at
TARGETS = {(1, 1): 18, (8, 1): 19, (8, 4): 20, (32, 4): 24}


BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def layer(rows: int, adapters: int, method: str = "ours", **case: int) -> dict[str, float]:
    """Return microseconds of the four groups of a layer, and of all; rows are dealt in turn."""
    slots = [row % adapters for row in range(rows)]
    found = measure_layer(slots, shape="llama-3.1-8b", methods=[method], **BF16, **case)[method]
    assert found is not None
    times = {group: round(us, 2) for group, us in found.items()}
    return {**times, "layer": round(sum(times.values()), 2)}


def decode() -> list[dict[str, Any]]:
    found = []
    for (rows, adapters), target in TARGETS.items():
        ours = layer(rows, adapters)
        found.append({"rows": rows, "adapters": adapters, **ours, "at_most": target})
        found[-1]["atomic"] = layer(rows, adapters, "atomic")["layer"]
        print(found[-1], flush=True)
    for rows, adapters in ((32, 1), (64, 4), (64, 16), (256, 4)):
        slots = max(4, adapters)
        times = layer(rows, adapters, max_loras=slots)
        found.append({"rows": rows, "adapters": adapters, **times})
        print(found[-1], flush=True)
    return found


def ratios() -> dict[str, Any]:
    """What idle slots and an unused part of the rank cost; each pair measured in turn."""
    pairs = {
        "1 active of 32 slots, over 1 of 1": ({"max_loras": 32}, {"max_loras": 1}),
        "rank 8 under 64, over 8 under 8": ({"rank": 8, "max_rank": 64}, {"rank": 8}),
        "rank 8 under 256, over 8 under 8": ({"rank": 8, "max_rank": 256}, {"rank": 8}),
        "rank 64, over 16": ({"rank": 64}, {"rank": 16}),
    }
    found = {}
    for name, (one, other) in pairs.items():
        for rows in (1, 8):
            times = [layer(rows, 1, **k)["layer"] for k in (one, other, one, other)]
            ratio = (times[0] + times[2]) / (times[1] + times[3])
            found[f"{name}, {rows} rows"] = {"us": times, "ratio": round(ratio, 3)}
    return found


def prefill() -> list[dict[str, Any]]:
    found = []
    for group in ("qkv", "o", "gate_up", "down"):
        width, outs = SHAPES["llama-3.1-8b"][group]
        slots = [row % 4 for row in range(2048)]
        work, few = (Case(width, outs, slots, **BF16, sets=sets) for sets in (16, 2))
        row = {
            "group": group,
            "ours": work.microseconds(work.ours, 20),
            "shrink": work.microseconds(work.shrink, 20),
            "gather_einsum": few.microseconds(few.gather_bmm, 5),
            "adapter_loop": few.microseconds(few.adapter_loop, 20),
        }
        row = {k: v if isinstance(v, str) else round(v, 1) for k, v in row.items()}
        found.append(row)
        print(row, flush=True)
        del work, few
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args()
    if args.tune:
        found: dict[str, Any] = tune()
    else:
        found = {
            **provenance("cuda", " ".join(["python", *sys.argv]), UNIT),
            "decode": decode(),
            "ratios": ratios(),
            "prefill 2048 rows, 4 adapters": prefill(),
        }
    text = json.dumps(found, indent=2)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(found.get("ratios", found), indent=1))


if __name__ == "__main__":
    main()
