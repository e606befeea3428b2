# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The shrink kernel: ``h[split, slice, row] = x[row, part of in] @ A[slot, :, part of in]^T``.

One program makes one tile of partial sums: up to BLOCK_M rows of one adapter, BLOCK_R ranks of
one slice, one of the splits of the input width. Splits fill the machine when rows are few.
Nobody adds into memory: `expand` sums the splits, in a fixed order, as it loads them. So every
run gives the same bits, and there is no buffer to clear.

The rows of A past an adapter's rank are not read (they may be NaN). The sums there are written
as zeros, up to the end of the block, because expand reads whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minilora.ops.triton.launch import (
    INTERPRETED,
    Routing,
    check_slices,
    launches_early,
    new_h,
    next_power_of_2,
    shrink_launch,
    three,
)
from minilora.ops.triton.routing import one_of_three, prefetch, rows_by_mapping, rows_by_tile


@triton.jit
def _prefetch_a(
    a, slot, ranks, r0, k0, width,
    R: tl.constexpr, BLOCK_R: tl.constexpr, LINES: tl.constexpr, HAS_RANKS: tl.constexpr,
):  # fmt: skip
    """Start moving this program's part of A towards L2 while the kernel before still runs.

    What that kernel writes cannot be read yet: slot and rank are guesses, used for hints only,
    and read past the L1 cache, which would keep the old values.
    """
    LINE: tl.constexpr = 128 * 8 // a.dtype.element_ty.primitive_bitwidth
    rank = tl.full((), R, tl.int32)
    if HAS_RANKS:
        rank = tl.minimum(tl.load(ranks + slot, cache_modifier=".cg"), R)
    if r0 < rank:
        r = tl.minimum(r0 + tl.arange(0, BLOCK_R), rank - 1)
        k = tl.minimum(k0 + tl.arange(0, LINES) * LINE, width - 1)
        prefetch(a + slot.to(tl.int64) * (R * width) + (r * width)[:, None] + k[None, :])


@triton.jit
def _product_of_few_rows(
    x_rows, mine, a_rows, real, k0, width,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    WAYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_R] where a tile is too small to share: each warp takes a part of k.

    A tile of 16 x 16 keeps one warp busy; without this the others would repeat its work.
    """
    way = tl.arange(0, WAYS) * (BLOCK_K // WAYS)
    acc = tl.zeros((WAYS, BLOCK_M, BLOCK_R), tl.float32)
    for step in range(STEPS):
        k = (k0 + step * BLOCK_K + way)[:, None] + tl.arange(0, BLOCK_K // WAYS)[None, :]
        inside = k < width
        # A^T comes by its addresses [W, k, r]: a transposition of the loaded tile would be
        # moved up to the load, and the load of x would wait for it.
        a_mask = inside[:, :, None] & real[None, None, :]
        a = tl.load(a_rows[None, None, :] + k[:, :, None], mask=a_mask, other=0.0)
        x_mask = inside[:, None, :] & mine[None, :, None]
        x = tl.load(x_rows[None, :, None] + k[:, None, :], mask=x_mask, other=0.0)
        if EXACT:
            a, x = a.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _product_of_many_rows(
    x_rows, mine, a_rows, real, k0, width,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_R] by a plain loop over k, which the compiler pipelines."""
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(STEPS):
        k = k0 + step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < width
        a_mask = inside[:, None] & real[None, :]
        a = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
        x_mask = mine[:, None] & inside[None, :]
        x = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0)
        if EXACT:
            a, x = a.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    return acc


@triton.jit(
    do_not_specialize=["num_tokens", "num_active", "num_slots", "stacked_rank"],
    do_not_specialize_on_alignment=["mapping", "order", "active_ids", "counts", "ranks"],
)
def _shrink_kernel(
    x, a0, a1, a2, h, mapping, order, active_ids, counts, ranks,
    num_tokens, num_active, num_slots, stacked_rank, width, x_stride,
    R: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, WAYS: tl.constexpr,
    LINES: tl.constexpr, HAS_RANKS: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, slices x blocks of ranks, groups or tiles); GROUPS 0: rows by mapping."""
    split, tile = tl.program_id(0), tl.program_id(2)
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    piece = tl.program_id(1) // R_BLOCKS
    r0 = (tl.program_id(1) % R_BLOCKS) * BLOCK_R
    k0 = split * (STEPS * BLOCK_K)
    a = one_of_three(piece, a0, a1, a2, SLICES)
    guess = tile
    if EARLY:
        if GROUPS == 0:
            guess = tl.load(active_ids + tile, cache_modifier=".cg")
            guess = tl.minimum(tl.maximum(guess, 0), num_slots - 1)
            _prefetch_a(a, guess, ranks, r0, k0, width, R, BLOCK_R, LINES, HAS_RANKS)
        gdc_wait()
        # Only after the wait: expand, which this lets start, reads weights and routing at once.
        gdc_launch_dependents()
    if GROUPS == 0:
        slot, rank, rows, mine = rows_by_mapping(
            tile, active_ids, mapping, ranks, num_tokens, guess, R, BLOCK_M, HAS_RANKS
        )
    else:
        slot, rank, rows, mine = rows_by_tile(
            tile, active_ids, counts, order, ranks, num_active, R, BLOCK_M, GROUPS, HAS_RANKS
        )
    if (slot < 0) | (r0 >= rank):
        return
    r = r0 + tl.arange(0, BLOCK_R)
    real = r < rank
    x_rows = x + rows.to(tl.int64) * x_stride  # row x stride passes 2^31
    a_rows = a + slot.to(tl.int64) * (R * width) + r * width
    if WAYS > 1:
        acc = _product_of_few_rows(
            x_rows, mine, a_rows, real, k0, width,
            BLOCK_M, BLOCK_R, BLOCK_K, STEPS, WAYS, EXACT,
        )  # fmt: skip
    else:
        acc = _product_of_many_rows(
            x_rows, mine, a_rows, real, k0, width, BLOCK_M, BLOCK_R, BLOCK_K, STEPS, EXACT
        )
    plane = h + (split * SLICES + piece).to(tl.int64) * num_tokens * R
    h_tile = plane + (rows * R)[:, None] + r[None, :]
    # Zeros past the rank are written too, as expand reads whole blocks. The bound is not the
    # constant R: where ptxas 12.8 sees that columns of a wgmma are not used, it can drop all.
    tl.store(h_tile, acc, mask=mine[:, None] & (r < stacked_rank)[None, :])


def shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    routing: Routing,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> torch.Tensor:
    """Launch the kernel; arguments as for `minilora.ops.lora_shrink`.

    Returns:
        ``h``, float32 ``[splits, slices, T, r]``. Of it only what `expand` reads is written.

    Raises:
        ValueError: more than three slices, slices of unlike rank, or weights not contiguous.
    """
    check_slices("lora_a", lora_a, rank_dim=1)
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, width = x.shape
    _, rank, _ = lora_a[0].shape
    h = new_h(x, lora_a)
    active = routing.groups(num_active_loras)
    if active <= 0 or not num_tokens:
        return h
    plan = shrink_launch(num_tokens, active, width, rank, h.shape[0], x)
    grid = (h.shape[0], len(lora_a) * -(-rank // plan.block_r), plan.tiles)
    early = launches_early(x.device)
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "launch_pdl": early}
    _shrink_kernel[grid](
        x, *three(lora_a), h, *routing, lora_ranks if lora_ranks is not None else routing.mapping,
        num_tokens, active, lora_a[0].shape[0], rank, width, x.stride(0),
        R=rank, SLICES=len(lora_a), STEPS=plan.steps, GROUPS=plan.groups,
        BLOCK_M=plan.block_m, BLOCK_R=plan.block_r, BLOCK_K=plan.block_k, WAYS=plan.ways,
        LINES=next_power_of_2(plan.steps * plan.block_k * x.element_size() // 128),
        HAS_RANKS=lora_ranks is not None, EARLY=early,
        EXACT=INTERPRETED or x.dtype != lora_a[0].dtype,
        **({} if INTERPRETED else options),
    )  # fmt: skip
    return h
