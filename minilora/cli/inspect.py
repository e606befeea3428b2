"""``minilora inspect``: a model's graphs, memory, slots, and the buffers of one step."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilora.cli.made import TINY_OPTIONS, best_graph, make_tiny, parse_loras
from minilora.cli.options import add_flags, given
from minilora.config.engine import EngineConfig

if TYPE_CHECKING:
    from minilora.engine.llm import LLM

_MIB = 1 << 20
_LEFT_OUT = {"model", "enable_lora"}


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show a model's captured graphs, memory, slots and a step's buffers",
        description="Start an engine, serve three requests (two adapters and the base model, if "
        "there are so many), and show its graphs, its memory, its slots, and what the buffers of "
        "its last step hold. The made model runs from recorded graphs where there is no CUDA; with "
        "--model on a CPU, ask for them with --graph recorded.",
    )
    parser.add_argument("--model", metavar="DIR", help="a checkpoint (default: a tiny made one)")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME=DIR", help="an adapter (repeatable)"
    )
    add_flags(parser, "engine", EngineConfig, _LEFT_OUT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start, serve one batch, print."""
    adapters = parse_loras(args.lora, args.model)
    options = given(args, EngineConfig, _LEFT_OUT)
    with tempfile.TemporaryDirectory(prefix="minilora-inspect-") as name:
        model = args.model
        if model is None:
            model, adapters = make_tiny(Path(name))
            graph = best_graph(options.get("device", "auto"))
            options = {**TINY_OPTIONS, "graph": graph, **options}
        _inspect(model, adapters, options)
    return 0


def _inspect(model: str, adapters: dict[str, str], options: dict[str, Any]) -> None:
    from rich.console import Console

    from minilora.engine.llm import LLM

    llm = LLM(model, **{"enable_lora": bool(adapters), **options})
    for name, path in adapters.items():
        llm.load_adapter(name, path)
    console = Console()
    for table in (_graphs(llm), _memory(llm), _dispatch(llm)):
        console.print(table)
    step = _serve(llm, adapters)
    if adapters:
        console.print(_slots(llm))
    console.print(step)


def _graphs(llm: LLM) -> Any:
    from rich.table import Table

    report = llm.capture_report
    title = f"graphs ({llm.config.graph}): {report}"
    table = Table("mode", "adapters", "graphs", "seconds", "MiB", title=title)
    for case in report.cases:
        cells = case.mode.name, case.num_active_loras, case.graphs
        seconds, memory = f"{case.seconds:.2f}", f"{case.memory / _MIB:.1f}"
        table.add_row(*map(str, cells), seconds, memory)
    table.add_row("pool of all", "", "", "", f"{report.pool_memory / _MIB:.1f}")
    return table


def _memory(llm: LLM) -> Any:
    from rich.table import Table

    model = llm.runner.model
    stacks = [t for layer in model.lora_layers() for _, t in layer.slot_tensors()]
    sizes = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "adapter slots": sum(t.nbytes for t in stacks),
        "KV pool": llm.kv_cache.tensor.nbytes,
        "step buffers": llm.runner.buffers.packed.tensor.nbytes,
        "graphs": llm.capture_report.memory,
    }
    table = Table("what", "MiB", title="memory")
    for name, size in sizes.items():
        table.add_row(name, f"{size / _MIB:.2f}")
    return table


def _dispatch(llm: LLM) -> Any:
    from rich.table import Table

    from minilora.graphs.dispatch_table import dispatch_table

    config = llm.config
    slots = config.max_loras if config.enable_lora else 0
    table = Table("step", "rows", "adapters", "graph", "padding", title="which graph a step gets")
    limits = config.max_num_batched_tokens, config.max_num_seqs
    for choice in dispatch_table(llm.runner.dispatcher, *limits, slots):
        table.add_row("decode" if choice.uniform else "mixed", *choice.columns())
    return table


def _slots(llm: LLM) -> Any:
    from rich.table import Table

    table = Table("adapter", "rank", "slot", "users", "pinned", title="adapters")
    for info in llm.list_adapters():
        slot = "-" if info.lora_slot is None else str(info.lora_slot)
        pinned = "yes" if info.pinned else ""
        table.add_row(info.name, str(info.rank), slot, str(info.num_users), pinned)
    return table


def _serve(llm: LLM, adapters: dict[str, str]) -> Any:
    """Serve adapter, base, adapter, and return the buffers of the last decode step."""
    from minilora.config.lora import LoRARequest
    from minilora.config.sampling import SamplingParams

    names = list(adapters)
    first, last = (names[0], names[min(1, len(names) - 1)]) if names else (None, None)
    loras = [LoRARequest(n) if n else None for n in (first, None, last)]
    loras = loras[: llm.config.max_num_seqs]
    seen: list[Any] = []
    prepare = llm.runner.prepare

    def watched(batch: Any) -> Any:
        key, step = prepare(batch)
        seen.append((key, batch.num_tokens, _buffers(step)))
        return key, step

    llm.runner.prepare = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[3, 4, 5]] * len(loras), params, loras if adapters else None, progress=False)
    return _step_table(*seen[-1])


def _buffers(step: Any) -> dict[str, list[Any]]:
    meta = step.meta
    by_row = {
        "input_ids": step.input_ids,
        "positions": step.positions,
        "slot_mapping": step.slot_mapping,
        "context_lens": step.context_lens,
        "block_tables": step.block_tables[:, :4],
        "token_lora_mapping": meta.token_lora_mapping,
        "token_indices_sorted_by_lora_ids": meta.token_indices_sorted_by_lora_ids,
        "active_lora_ids": meta.active_lora_ids,
        "num_tokens_per_lora": meta.num_tokens_per_lora,
        "lora_token_start_loc": meta.lora_token_start_loc,
    }
    return {name: tensor.tolist() for name, tensor in by_row.items()}


def _step_table(key: Any, rows: int, buffers: dict[str, list[Any]]) -> Any:
    from rich.table import Table

    chosen = key.descriptor
    title = (
        f"the last step: {rows} rows, run {key.mode.name} with {chosen.num_tokens} rows "
        f"({chosen.num_tokens - rows} padding) and {chosen.num_active_loras} groups"
    )
    table = Table("buffer", "holds", title=title)
    for name, values in buffers.items():
        table.add_row(name, str(values))
    return table
