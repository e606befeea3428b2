"""The page of the kernels, from `h200-kernels.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables import table

GROUPS = ("qkv", "o", "gate_up", "down")


def decode(rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]]) -> str:
    """One layer's LoRA in a decode step, beside the fastest of others."""
    best = {(p.pop("rows"), p.pop("adapters")): min(p.values()) for p in map(dict, peers)}
    keys = ("rows", "adapters", *GROUPS, "layer", "at_most", "atomic")
    head = ("M", "n", *GROUPS, "one layer", "target", "with atomic adds", "best of others")
    body = [
        [*(row.get(key) for key in keys), best.get((row["rows"], row["adapters"]))] for row in rows
    ]
    return table(head, body)


def ratios(pairs: dict[str, dict[str, Any]]) -> str:
    """What idle slots, unused rank and a large rank cost."""
    rows = []
    for name, found in pairs.items():
        one, other, again, other_again = found["us"]
        rows.append([name, f"{one}, {again}", f"{other}, {other_again}", found["ratio"]])
    return table(("what, over what", "first, µs", "second, µs", "ratio"), rows)


def prefill(rows: Sequence[dict[str, Any]]) -> str:
    """Long batches, beside two ways of plain PyTorch."""
    body = []
    for row in rows:
        best = min(row["gather_einsum"], row["adapter_loop"])
        faster = f"{best / row['ours']:.1f} x"
        cells = [row[key] for key in ("group", "ours", "shrink", "gather_einsum", "adapter_loop")]
        body.append([*cells, faster])
    head = ("group", "ours", "of it shrink", "gather + einsum", "loop over adapters", "faster by")
    return table(head, body)


def page(data: dict[str, Any], elsewhere: dict[str, Any]) -> str:
    """Return the page."""
    return f"""# The kernels, measured

<!-- Made by docs/benchmarks/make_pages.py from h200-kernels.json; edit those. -->

Machine: {data["machine"]}, {data["versions"]}. Date: {data["date"]}.
Command: `{data["command"]}`.
Unit: {data["unit"]}. What limits each number is on [the page of the kernels](../kernels.md).

## Decode: shrink + expand of one layer

µs of the four launches of each kind, for M rows and n adapters. "Target" is the time that was
aimed at before the kernels were written. "With atomic adds" is the classical variant
(`ops/triton/shrink_atomic.py`): one launch a slice, its buffer cleared inside the op. "Best of
others" is the fastest of vLLM 0.33 and SGLang 0.5.23, [timed once](elsewhere.md) in the same way;
the command does not make that column again.

<!-- --8<-- [start:decode] -->

{decode(data["decode"], elsewhere["kernels"])}

<!-- --8<-- [end:decode] -->

## What idle slots and unused ranks cost

µs of one layer with one adapter, each pair measured in turn, twice.

{ratios(data["ratios"])}

## Prefill: {next(key for key in data if key.startswith("prefill")).removeprefix("prefill ")}

µs a group. Both ways of plain PyTorch run in a CUDA graph too (with two sets of weights).

{prefill(next(value for key, value in data.items() if key.startswith("prefill")))}
"""
