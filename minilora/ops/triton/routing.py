# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the LoRA kernels share on the device: which rows a program works on.

There are two ways to find them. With few rows a program looks at *every* row of the step and
keeps those whose slot is its own: one read of the mapping, side by side with everything else.
With many rows it takes one tile of the sorted rows: three reads, each of which needs the one
before, but no wasted work.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_by_mapping(
    group, active_ids, mapping, ranks, num_tokens, guess,
    R: tl.constexpr, BLOCK_M: tl.constexpr, HAS_RANKS: tl.constexpr,
):  # fmt: skip
    """Return the group's slot and rank, every row of the step, and which rows are the slot's own.

    `guess` is any slot in range. The rank is read for it, in one go with the slot, and read
    again in the rare case that it was wrong.
    """
    rows = tl.arange(0, BLOCK_M)
    slot = tl.load(active_ids + group)
    slot_of_row = tl.load(mapping + rows, mask=rows < num_tokens, other=-1)
    rank = tl.full((), R, tl.int32)
    if HAS_RANKS:
        rank = tl.load(ranks + guess)
        if (slot != guess) & (slot >= 0):
            rank = tl.load(ranks + slot)
    # Slot -1 is no group's. Both tests are by row: Triton 3.9's interpreter cannot spread one
    # truth value over a block.
    return slot, rank, rows, (slot_of_row == slot) & (slot_of_row >= 0)


@triton.jit
def rows_by_tile(
    tile, active_ids, counts, order, ranks, num_active,
    R: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, HAS_RANKS: tl.constexpr,
):  # fmt: skip
    """Return slot, rank, rows and row mask of one tile of the sorted rows (slot -1: no tile).

    Tiles are numbered through the groups, so the grid needs only as many as there can be:
    ``cdiv(T, BLOCK_M) + num_active - 1``. Groups at or past `num_active` do not exist.
    """
    groups = tl.arange(0, GROUPS)
    real = groups < num_active
    count = tl.load(counts + groups, mask=real, other=0)
    slots = tl.load(active_ids + groups, mask=real, other=-1)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = groups < group
    position = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = position < tl.sum(tl.where(groups == group, count, 0), 0)
    start = tl.sum(tl.where(before, count, 0), 0)
    rows = tl.load(order + start + position, mask=mine, other=0)
    slot = tl.max(tl.where(groups == group, slots, -1), 0)
    rank = tl.full((), R, tl.int32)
    if HAS_RANKS:
        rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    return slot, rank, rows, mine


@triton.jit
def one_of_three(index, p0, p1, p2, SLICES: tl.constexpr):
    """Return what belongs to a slice: its pointer, say, without a table of pointers in memory."""
    if SLICES == 1:
        return p0
    if SLICES == 2:
        return tl.where(index == 0, p0, p1)
    return tl.where(index == 0, p0, tl.where(index == 1, p1, p2))


@triton.jit
def prefetch(pointers):
    """Ask for cache lines to be in L2; only a hint, so it may name data not yet written."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [pointers.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )
