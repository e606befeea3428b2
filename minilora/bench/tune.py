"""Search the launches of the LoRA kernels on one GPU, for a table of `ops/triton/configs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from minilora.bench.lora_case import SHAPES, Case
from minilora.ops.triton.launch import architecture, table

# (rows of a tile, rows of the step, adapters) for each class of the table. Wide layers have
# entries of their own.
_SHRINK_CLASSES = [(1, 8, 4), (8, 32, 4), (16, 64, 4), (32, 128, 4), (64, 2048, 4)]
_EXPAND_CLASSES = [(1, 8, 4), (8, 32, 4), (16, 64, 4), (32, 2048, 4)]


def tune(name: str = "cuda") -> dict[str, Any]:
    """Return a new table for this GPU: for each class of tiles the fastest of a few launches."""
    entries: dict[str, list[dict[str, int]]] = {"shrink": [], "expand": []}
    for rows, tokens, adapters in _SHRINK_CLASSES:
        for group, width in (("qkv", 0), ("down", 8192)):
            work = _case(group, tokens, adapters)
            best = _fastest("shrink", rows, width, work, work.shrink)
            entries["shrink"].append(best)
    for rows, tokens, adapters in _EXPAND_CLASSES:
        for group, width in (("qkv", 0), ("gate_up", 16384)):
            work = _case(group, tokens, adapters)
            call = partial(work.expand, work.shrink())
            best = _fastest("expand", rows, width, work, call)
            entries["expand"].append(best)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return {**table(architecture(torch.device(name))), "machine": machine, **entries}


def _case(group: str, rows: int, adapters: int) -> Case:
    width, outs = SHAPES["llama-3.1-8b"][group]
    slots = [row % adapters for row in range(rows)]
    return Case(width, outs, slots, dtype=torch.bfloat16, device="cuda", sets=16)


def _fastest(
    kernel: str, rows: int, width: int, work: Case, call: Callable[[int], object]
) -> dict[str, int]:
    timed = []
    for candidate in _candidates(kernel, rows):
        with _only(kernel, candidate):
            timed.append((work.microseconds(call, 20), candidate))
    best = min(timed, key=lambda pair: pair[0])[1]
    return {**best, "rows": rows, "width": width}


def _candidates(kernel: str, rows: int) -> Iterator[dict[str, int]]:
    base = {"rows": 64, "width": 0}
    if kernel == "expand":
        for block_n, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8)):
            yield {**base, "block_n": block_n, "warps": warps}
        return
    blocks: Sequence[tuple[int, int]] = ((128, 2), (256, 2), (256, 4), (512, 4))
    if rows == 64:
        blocks = ((64, 4), (128, 4), (128, 8))
    for block_k, warps in blocks:
        for stages in (3, 4):
            yield {**base, "block_k": block_k, "warps": warps, "stages": stages}


@contextmanager
def _only(kernel: str, entry: dict[str, int]) -> Iterator[None]:
    """Let every launch of a kernel use one entry."""
    data: Any = table(architecture(torch.device("cuda", torch.cuda.current_device())))
    kept = data[kernel]
    data[kernel] = [entry]
    try:
        yield
    finally:
        data[kernel] = kept
