"""How decode attention is launched: how contexts are dealt to programs, and in which tiles.

A launch depends on shapes, dtypes and the bound of the contexts only, never on a context.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from minilora.ops.triton.launch import INTERPRETED, next_power_of_2

MOST_SPLITS = 64  # the merging kernel loads all shares of a row at once
LEAST_TILES = 2  # of a share: merging costs as much as a short share's own work
LONG = 8192  # tokens that one program may be left alone with, however many rows there are
GROUP_ROWS = 16  # query heads of one program; the least rows of a matrix product
WARPS = 4


class Form(NamedTuple):
    """Figures of one form of the kernel.

    Attributes:
        tile_bytes: keys of one tile; the values take as many again.
        stages: depth of the loads' pipeline. Where it also holds the look-up of the blocks,
            two stages are one tile in flight.
        programs: how many fill one multiprocessor.
    """

    tile_bytes: int
    stages: int
    programs: int


ONE = Form(tile_bytes=8192, stages=3, programs=4)
GROUP = Form(tile_bytes=16384, stages=5, programs=2)
GROUP_OF_FLOAT32 = Form(tile_bytes=8192, stages=5, programs=2)  # exact products: more registers


class DecodePlan(NamedTuple):
    """How a call is launched; it depends on shapes, dtypes and the bound of the contexts only.

    Attributes:
        splits: programs for each row and KV head (and 16 query heads of it).
        longest: the bound of the contexts, at most what the tables describe.
        parts: programs that share the query heads of one KV head.
        block_g: query heads of one program, padded; 1 for the form without matrix products.
        block_d: the head width, padded: at least 16, the least depth of a matrix product.
        block_n: tokens of one tile.
        stages: depth of the loads' pipeline.
        exact: whether products are of float32 operands.
    """

    splits: int
    longest: int
    parts: int
    block_g: int
    block_d: int
    block_n: int
    stages: int
    exact: bool


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits_of(programs: int, longest: int, block_n: int, fill: int) -> int:
    """Return into how many shares a context is dealt at most.

    Args:
        programs: programs that there are without a split.
        longest: the bound of the contexts.
        block_n: tokens of a tile.
        fill: programs that fill the machine.
    """
    wanted = max(fill // max(1, programs), -(-longest // LONG))
    return max(1, min(wanted, -(-longest // (block_n * LEAST_TILES)), MOST_SPLITS))


def decode_plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    splits: int | None = None,
) -> DecodePlan:
    """Choose the launch of a call; `splits` overrides how contexts are dealt (1 to 64)."""
    rows, heads, width = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    item = max(q.element_size(), k_cache.element_size())
    form = ONE if group == 1 else GROUP_OF_FLOAT32 if item > 2 else GROUP
    parts = -(-group // GROUP_ROWS)
    block_d = max(16, next_power_of_2(width))
    block_n = max(16, min(64, form.tile_bytes // (block_d * item)))
    longest = max(0, min(max_context_len, block_tables.shape[1] * block_size))
    if splits is None:
        fill = form.programs * _processors(q.device)
        splits = splits_of(rows * kv_heads * parts, longest, block_n, fill)
    return DecodePlan(
        splits,
        longest,
        parts,
        block_g=1 if group == 1 else GROUP_ROWS,
        block_d=block_d,
        block_n=block_n,
        stages=form.stages,
        exact=INTERPRETED or item > 2 or q.dtype != k_cache.dtype,
    )
