"""The page of ``minilora verify --html``: verdicts, dispatch table, and launches side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment

from minilora.batch import GraphMode
from minilora.engine.llm import LLM
from minilora.graphs.dispatch_table import dispatch_table
from minilora.graphs.dispatcher import GraphKey
from minilora.testing.invariants import is_lora_launch
from minilora.testing.parity import ParityReport

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_LONGEST = 60
_ATEN = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(\w+)(?:_kernel\w*|Functor)")


def page(report: ParityReport, llm: LLM) -> str:
    """Return a page that needs no other file and asks no other host.

    Args:
        report: the verdicts.
        llm: an engine with graphs of both modes, whose dispatch and launches to show.
    """
    config = llm.config
    slots = config.max_loras if config.enable_lora else 0
    choices = dispatch_table(
        llm.runner.dispatcher, config.max_num_batched_tokens, config.max_num_seqs, slots
    )
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        choices=choices,
        columns=[_launches(llm, key) for key in _pair(llm)],
        capture=str(llm.capture_report),
        backend=config.graph,
    )


def _pair(llm: LLM) -> list[GraphKey]:
    """Return the smallest FULL graph with LoRA, after the one without of the same rows."""
    full = sorted(
        (key for key in llm.runner.graphs if key.mode is GraphMode.FULL),
        key=lambda key: (key.descriptor.num_tokens, key.descriptor.num_active_loras),
    )
    with_lora = next((key for key in full if key.descriptor.has_lora), None)
    rows = with_lora.descriptor.num_tokens if with_lora else 0
    without = [k for k in full if not k.descriptor.has_lora and k.descriptor.num_tokens >= rows]
    return without[:1] + ([with_lora] if with_lora else [])


def _launches(llm: LLM, key: GraphKey) -> dict[str, Any]:
    nodes = llm.runner.nodes(key)
    rows = [{"name": short_name(n), "full": n, "lora": is_lora_launch(n)} for n in nodes]
    chosen = key.descriptor
    return {
        "title": f"{chosen.num_tokens} rows, {chosen.num_active_loras} adapters",
        "nodes": rows,
        "lora": sum(row["lora"] for row in rows),
    }


def short_name(node: str) -> str:
    """Return a launch's name without template arguments, as a reader knows it."""
    name = node.removeprefix("void ")
    inner = _ATEN.findall(name)
    if inner:
        return f"aten: {inner[-1]}"[:_LONGEST]
    return re.split(r"[<(]", name)[0][:_LONGEST] or name[:_LONGEST]
