"""The page of what other programs take, from `h200-elsewhere.json`."""

from __future__ import annotations

from typing import Any

from tables import table


def kernels(rows: list[dict[str, Any]]) -> str:
    """LoRA kernels of other engines, one layer."""
    names = [key for key in rows[0] if key not in ("rows", "adapters")]
    return table(("M", "n", *names), [list(row.values()) for row in rows])


def graphs(found: dict[str, dict[str, float]]) -> str:
    """Memory and time of vLLM's graphs."""
    rows = [[name, one["gib"], one["seconds"]] for name, one in found.items()]
    return table(("graphs", "GiB", "seconds to capture"), rows)


def page(data: dict[str, Any]) -> str:
    """Return the page."""
    return f"""# Other programs, measured

<!-- Made by docs/benchmarks/make_pages.py from h200-elsewhere.json; edit those. -->

What the other pages compare with. Machine: one {data["machine"]}. {data["versions"]}.
Date: {data["date"]}. These are other people's programs, timed once; no command of this repository
makes these figures again. Unit: {data["unit"]}.

## The machine

{table(("ceiling", ""), list(data["ceilings"].items()))}

## LoRA kernels

µs of shrink + expand of one layer, M rows and n adapters.

{kernels(data["kernels"])}

## Whole answers

{table(("program", "seconds"), list(data["answers"].items()))}

## Graphs of vLLM 0.24

{graphs(data["graphs of vLLM 0.24, sizes to 64"])}
"""
