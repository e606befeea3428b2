"""The page of a CPU, from `cpu-decode.json` and `cpu-peers.json`."""

from __future__ import annotations

from typing import Any

from tables import origin, table

from minilora.bench.plot import bars


def over_transformers(found: dict[str, dict[str, Any]]) -> str:
    """Our decode step over transformers' and PEFT's."""
    rows = [
        [name.split()[0], one["first_ms"], one["second_ms"], one["ratio"]]
        for name, one in found.items()
    ]
    return table(("adapters", "transformers or PEFT, ms", "minilora, ms", "ours over theirs"), rows)


def over_base(found: dict[str, dict[str, Any]]) -> str:
    """A decode step with adapters over one of base rows."""
    spread = {
        "distinct": "2 rows each",
        "skewed": "4, 2, 1 and 1 rows",
        "base_mixed": "1 row each, 4 without",
        "identical": "8 rows of one",
    }
    rows = [
        [f"{name} ({spread[name]})", one["first_ms"], one["second_ms"], one["ratio"]]
        for name, one in found.items()
    ]
    return table(("workload", "base rows, ms", "with adapters, ms", "ratio"), rows)


def peers(results: dict[str, dict[str, Any]]) -> str:
    """Whole answers, beside transformers and PEFT."""
    rows = [
        [name, *(f"{one['percentiles'][p]:.2f}" for p in ("10", "50", "90")), one["samples"]]
        for name, one in results.items()
    ]
    return table(("", "10th percentile", "median, s", "90th", "samples"), rows)


def page(decode: dict[str, Any], whole: dict[str, Any]) -> str:
    """Return the page."""
    medians = {name: one["percentiles"]["50"] for name, one in whole["results"].items()}
    of, pairs = whole["options"], decode["over base rows"]["distinct"]["pairs"]
    return f"""# A CPU, measured

<!-- Made by docs/benchmarks/make_pages.py from cpu-decode.json and cpu-peers.json; edit those. -->

SmolLM2-135M's shape with random weights, float32, eight rows, adapters on all seven projections.
minilora runs eagerly here, as it does by default without a GPU.

## A decode step

{origin(decode)} Rank {decode["rank"]}.

Theirs is the forward pass of transformers alone, without `generate` around it, and with one or
four adapters of PEFT, mixed by `adapter_names` (PEFT's way to serve a mixed batch). Ours is all of
`ModelRunner.execute`. The two are timed in turn, {pairs} pairs.

{over_transformers(decode["over transformers"])}

Without adapters, attention here finds its tokens through block tables and copies them, which theirs
does not. With one adapter for the whole batch, PEFT runs two small products a projection, where the
ops here read tables, gather rows and put them back too. Mixed, each of PEFT's adapters does that,
and all of ours do it once.

## What adapters add to a step

<!-- --8<-- [start:adapters] -->

{over_base(decode["over base rows"])}

<!-- --8<-- [end:adapters] -->

## Whole answers

{origin(whole)}

{of["batch_size"]} prompts of {of["input_len"]} tokens, {of["output_len"]} tokens of answer each,
rank {of["rank"]}; all cases in turn.

{bars(medians, "one batch from prompt to last token, median", "s", inline=True)}
{peers(whole["results"])}
"""
