# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The expand kernel: ``out[row] += (sum of splits of h[row]) @ B[slot]^T``, in place.

One program owns one tile of the output: up to BLOCK_M rows of one adapter, BLOCK_N columns of
one slice. It sums the splits that shrink left, in a fixed order, multiplies, adds what the
output holds, all in float32, and rounds once.

On Hopper and newer it is launched before the kernel in front of it has finished, and reads
routing, ranks and B at once; only h and the output wait. This is sound because shrink lets
nothing start before everything older is complete. It asks one thing of the caller: the
operation right before an expand does not write B, the ranks or the routing tables.
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
    expand_launch,
    launches_early,
    next_power_of_2,
    three,
)
from minilora.ops.triton.routing import one_of_three, rows_by_mapping, rows_by_tile


@triton.jit
def _load_b(b_rows, real, r0, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """[BLOCK_R, BLOCK_N] of B^T from rank r0 on."""
    r = r0 + tl.arange(0, BLOCK_R)
    mask = (r < R)[:, None] & real[None, :]
    return tl.load(b_rows[None, :] + r[:, None], mask=mask, other=0.0)


@triton.jit
def _load_h(
    h_rows, mine, r0, written, splits, plane,
    R: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_R]: all splits in one load (not one after the other), then a fixed tree.

    `written` is where the blocks that shrink wrote end.
    """
    r = r0 + tl.arange(0, BLOCK_R)
    split = tl.arange(0, SPLITS)[:, None, None]
    kept = (r < R) & (r < written)
    mask = (split < splits) & mine[None, :, None] & kept[None, None, :]
    tile = h_rows[None, :, None] + split * plane + r[None, None, :]
    return tl.sum(tl.load(tile, mask=mask, other=0.0), 0)


@triton.jit
def _add_product(acc, h, b, r0, rank, BLOCK_R: tl.constexpr, EXACT: tl.constexpr):
    """Return acc [BLOCK_M, BLOCK_N] + h [BLOCK_M, BLOCK_R] @ b [BLOCK_R, BLOCK_N]."""
    # What lies past the adapter's rank may be anything, NaN too; loaded first and dropped
    # here, so that the loads do not wait for the rank.
    inside = r0 + tl.arange(0, BLOCK_R) < rank
    b = tl.where(inside[:, None], b, 0.0)
    h = tl.where(inside[None, :], h, 0.0)
    if EXACT:
        acc = tl.dot(h, b.to(tl.float32), acc, input_precision="ieee")
    elif b.dtype == tl.float16:
        # h can pass what fp16 holds. Two tf32 products keep 21 bits of it.
        high = (h.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b = b.to(tl.float32)
        acc = tl.dot(h - high, b, acc, input_precision="tf32")
        acc = tl.dot(high, b, acc, input_precision="tf32")
    else:
        # Rounded to bf16 once, h would lose as much as the output does; two products keep 16
        # bits of it.
        high = h.to(tl.bfloat16)
        acc = tl.dot((h - high.to(tl.float32)).to(tl.bfloat16), b, acc)
        acc = tl.dot(high, b, acc)
    return acc


@triton.jit(
    do_not_specialize=["num_tokens", "num_active", "splits"],
    do_not_specialize_on_alignment=["mapping", "order", "active_ids", "counts", "ranks"],
)
def _expand_kernel(
    h, b0, b1, b2, out, mapping, order, active_ids, counts, ranks,
    num_tokens, num_active, splits, n0, n1, n2, out_stride,
    R: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, REST_R: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_RANKS: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid: (column blocks of all slices, groups or tiles); GROUPS 0: rows by mapping."""
    column, tile = tl.program_id(0), tl.program_id(1)
    end0 = (n0 + BLOCK_N - 1) // BLOCK_N
    end1 = end0 + (n1 + BLOCK_N - 1) // BLOCK_N
    piece = (column >= end0).to(tl.int32) + (column >= end1).to(tl.int32)
    n = one_of_three(piece, n0, n1, n2, SLICES)
    first = one_of_three(piece, 0, n0, n0 + n1, SLICES)
    column -= one_of_three(piece, 0, end0, end1, SLICES)
    if EARLY:
        gdc_launch_dependents()
    if GROUPS == 0:
        slot, rank, rows, mine = rows_by_mapping(
            tile, active_ids, mapping, ranks, num_tokens, tile, R, BLOCK_M, HAS_RANKS
        )
    else:
        slot, rank, rows, mine = rows_by_tile(
            tile, active_ids, counts, order, ranks, num_active, R, BLOCK_M, GROUPS, HAS_RANKS
        )
    if slot < 0:
        if EARLY:
            gdc_wait()  # every program waits: then "finished" covers the kernels before, too
        return
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    real = columns < n
    b_rows = one_of_three(piece, b0, b1, b2, SLICES) + slot.to(tl.int64) * n * R + columns * R
    b = _load_b(b_rows, real, 0, R, BLOCK_R)
    tiles = out + rows.to(tl.int64)[:, None] * out_stride + (first + columns)[None, :]
    # Compared row by row: Triton 3.9's interpreter cannot spread one truth value over a block.
    mine = mine & (tl.zeros_like(rows) < rank)
    inside = mine[:, None] & real[None, :]  # row x stride passes 2^31
    if EARLY:
        gdc_wait()
    before = tl.load(tiles, mask=inside, other=0.0)  # asked for early, used last
    plane = num_tokens.to(tl.int64) * (SLICES * R)  # from one split to the next
    h_rows = h + piece.to(tl.int64) * num_tokens * R + rows * R
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    part = _load_h(h_rows, mine, 0, BLOCK_R, splits, plane, R, BLOCK_R, SPLITS)
    acc = _add_product(acc, part, b, 0, rank, BLOCK_R, EXACT)
    if R > BLOCK_R:
        written = (rank + BLOCK_R - 1) // BLOCK_R * BLOCK_R
        for r0 in range(BLOCK_R, rank, REST_R):
            b_more = _load_b(b_rows, real, r0, R, REST_R)
            h_more = _load_h(h_rows, mine, r0, written, splits, plane, R, REST_R, SPLITS)
            acc = _add_product(acc, h_more, b_more, r0, rank, REST_R, EXACT)
    total = before.to(tl.float32) + acc
    tl.store(tiles, total.to(out.dtype.element_ty), mask=inside)


def expand(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    out: torch.Tensor,
    routing: Routing,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> None:
    """Launch the kernel; arguments as for `minilora.ops.lora_expand`.

    `h` comes from `shrink`, or has the plain form ``[slices, T, r]``.

    Raises:
        ValueError: more than three slices, slices of unlike rank, weights not contiguous, an
            `h` of another shape or layout, or an `out` whose columns are not side by side in
            memory.
    """
    check_slices("lora_b", lora_b, rank_dim=2)
    if out.stride(-1) != 1 and out.shape[1] > 1:
        raise ValueError(
            f"out has stride {out.stride(-1)} from column to column; only rows may have a stride"
        )
    num_tokens = out.shape[0]
    active = routing.groups(num_active_loras)
    if active <= 0 or not num_tokens:
        return
    if h.dim() == 3:
        h = h[None]
    widths = [b.shape[1] for b in lora_b]
    rank = lora_b[0].shape[2]
    if h.shape[1:] != (len(lora_b), num_tokens, rank) or not h.is_contiguous():
        raise ValueError(
            f"h has shape {list(h.shape)} and strides {list(h.stride())}; expand reads contiguous "
            f"[splits, {len(lora_b)}, {num_tokens}, {rank}], as lora_shrink returns it"
        )
    plan = expand_launch(num_tokens, active, sum(widths), rank, lora_b[0])
    columns = sum(-(-n // plan.block_n) for n in widths)
    early = launches_early(out.device)
    options = {"num_warps": plan.warps, "num_stages": 1, "launch_pdl": early}
    _expand_kernel[(columns, plan.tiles)](
        h, *three(lora_b), out, *routing,
        lora_ranks if lora_ranks is not None else routing.mapping,
        num_tokens, active, h.shape[0], *[*widths, 0, 0][:3], out.stride(0),
        R=rank, SLICES=len(lora_b), SPLITS=next_power_of_2(h.shape[0]), GROUPS=plan.groups,
        BLOCK_M=plan.block_m, BLOCK_R=plan.block_r, REST_R=plan.rest_r, BLOCK_N=plan.block_n,
        HAS_RANKS=lora_ranks is not None, EARLY=early,
        EXACT=INTERPRETED or lora_b[0].dtype == torch.float32,
        **({} if INTERPRETED else options),
    )  # fmt: skip
