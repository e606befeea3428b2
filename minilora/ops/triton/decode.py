# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decode attention: one new token of each request against its paged context, split.

The context of a row is dealt to `splits` programs for each KV head, so that a few long requests
fill the machine too. The launch knows only an upper bound of the contexts (in a graph, of any
replay's), so a program takes an equal share of its row's *real* context, and one that gets
nothing exits after a single load. If a row's context is one share, that program writes the
output; otherwise each leaves its running softmax in scratch memory, and a second kernel merges
the shares that are not empty, in a fixed order. Nobody adds into memory: every run gives the
same bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minilora.ops import scratch
from minilora.ops.triton.attend import LOWEST, attend_with_group, attend_with_one
from minilora.ops.triton.decode_plan import (
    LEAST_TILES,
    MOST_SPLITS,
    WARPS,
    DecodePlan,
    decode_plan,
)
from minilora.ops.triton.launch import INTERPRETED, launches_early


@triton.jit
def _shares(context, splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Return the tokens of one share of a context, and how many shares are not empty."""
    tiles = (context + BLOCK_N - 1) // BLOCK_N
    share = tl.maximum((tiles + splits - 1) // splits, LEAST) * BLOCK_N
    return share, (context + share - 1) // share


@triton.jit
def _store_output(out, place, mine, acc, total, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = mine[:, None] & (d < D)[None, :]
    tl.store(out + place[:, None] * D + d[None, :], acc / total[:, None], mask=mask)


@triton.jit(
    do_not_specialize=["splits", "longest", "table_stride"],
    do_not_specialize_on_alignment=["tables", "context_lens"],
)
def _decode_kernel(
    q, k_cache, v_cache, tables, context_lens, out, sums, stats,
    splits, longest, scale, table_stride, q_row, q_head,
    k_block, k_token, k_head, v_block, v_token, v_head,
    D: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    STAGES: tl.constexpr, MANY: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads x PARTS, splits, rows). MANY: there is more than one split."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # Heads first: neighbours read neighbouring memory.
    head, split, row = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    context = tl.maximum(tl.minimum(tl.load(context_lens + row), longest), 0)
    share, used = context, 1
    if MANY:
        share, used = _shares(context, splits, BLOCK_N, LEAST)
    start = split * share
    if (split > 0) & (start >= context):
        return
    stop = tl.minimum(start + share, context)
    row = row.to(tl.int64)
    table = tables + row * table_stride
    keys, values = k_cache + head.to(tl.int64) * k_head, v_cache + head.to(tl.int64) * v_head
    g = (tl.program_id(0) % PARTS) * BLOCK_G + tl.arange(0, BLOCK_G)
    mine = g < G
    if G == 1:
        best, total, acc = attend_with_one(
            q + row * q_row + head * q_head, keys, values, table, start, stop, scale,
            k_block, k_token, v_block, v_token, D, BLOCK_SIZE, BLOCK_D, BLOCK_N, STAGES,
        )  # fmt: skip
    else:
        q_rows = q + row * q_row + (head * G + g) * q_head
        best, total, acc = attend_with_group(
            q_rows, mine, keys, values, table, start, stop, scale,
            k_block, k_token, v_block, v_token,
            D, BLOCK_SIZE, BLOCK_D, BLOCK_N, BLOCK_G, STAGES, EXACT,
        )  # fmt: skip
    place = row * (tl.num_programs(0) // PARTS * G) + head * G + g
    if used <= 1:
        total = tl.where(context > 0, total, 1.0)  # a padding row gets zeros
        _store_output(out, place, mine, acc, total, D, BLOCK_D)
    elif MANY:
        place = place * splits + split
        tl.store(stats + place * 2, best, mask=mine)
        tl.store(stats + place * 2 + 1, total, mask=mine)
        _store_output(sums, place, mine, acc, tl.full((BLOCK_G,), 1.0, tl.float32), D, BLOCK_D)


@triton.jit(
    do_not_specialize=["splits", "longest"], do_not_specialize_on_alignment=["context_lens"]
)
def _merge_kernel(
    sums, stats, context_lens, out, splits, longest,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (query heads, rows). Merge the shares of a row that has more than one."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1)
    context = tl.maximum(tl.minimum(tl.load(context_lens + row), longest), 0)
    _, used = _shares(context, splits, BLOCK_N, LEAST)
    if used <= 1:
        return
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    written = split < used  # the rest of the scratch memory holds anything
    row_of_out = row.to(tl.int64) * tl.num_programs(0) + head
    place = row_of_out * splits + split
    best = tl.load(stats + place * 2, mask=written, other=LOWEST)
    total = tl.load(stats + place * 2 + 1, mask=written, other=0.0)
    mask = written[:, None] & (d < D)[None, :]
    acc = tl.load(sums + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))
    merged = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row_of_out * D + d, merged, mask=d < D)


def _scratch(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the sums ``[R, Hq, splits, D]`` and the softmax ``[R, Hq, splits, 2]``."""
    rows, heads, width = q.shape
    shapes = (rows, heads, splits, width), (rows, heads, splits, 2)
    sums, stats = (scratch.empty(shape, torch.float32, q.device) for shape in shapes)
    return sums, stats


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse what the kernels do not read right."""
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(
            f"k_cache and v_cache have strides {k_cache.stride()} and {v_cache.stride()}; the "
            "last must be 1: make the head width the last dimension of the pool's memory"
        )
    if q.shape[1] % k_cache.shape[2] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"q has {q.shape[1]} heads of width {q.shape[2]}, k_cache {k_cache.shape[2]} of "
            f"{k_cache.shape[3]}: the widths must be one, and q's heads a multiple"
        )


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    splits: int | None = None,
) -> torch.Tensor:
    """Launch the kernels; arguments as for `minilora.ops.attention.decode_attention`.

    Args:
        q: ``[R, Hq, D]``, any strides between rows and heads; the caches alike.
        k_cache: ``[num_blocks, block_size, Hkv, D]``.
        v_cache: as `k_cache`.
        block_tables: int32 ``[R, blocks]``.
        context_lens: int32 ``[R]``.
        max_context_len: the bound of `context_lens`.
        scale: multiplies the scores.
        splits: into how many shares a context is dealt at most; None: as fills the machine.

    Returns:
        ``[R, Hq, D]``, contiguous.

    Raises:
        ValueError: caches without unit stride in the last dimension, or heads that do not fit.
    """
    _check(q, k_cache, v_cache)
    q = q if q.stride(-1) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous()
    context_lens = context_lens.contiguous()
    out = scratch.empty(q.shape, q.dtype, q.device)
    if not out.numel():
        return out
    plan = decode_plan(q, k_cache, block_tables, max_context_len, splits)
    many = plan.splits > 1
    sums, stats = _scratch(q, plan.splits) if many else (out, out)
    _launch(q, k_cache, v_cache, block_tables, context_lens, out, sums, stats, scale, plan)
    if many:
        _merge(sums, stats, context_lens, out, plan)
    return out


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    stats: torch.Tensor,
    scale: float,
    plan: DecodePlan,
) -> None:
    rows, heads, width = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    early = launches_early(q.device)
    _decode_kernel[kv_heads * plan.parts, plan.splits, rows](
        q, k_cache, v_cache, block_tables, context_lens, out, sums, stats,
        plan.splits, plan.longest, scale * math.log2(math.e), block_tables.stride(0),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        D=width, G=heads // kv_heads, PARTS=plan.parts, BLOCK_SIZE=block_size,
        BLOCK_D=plan.block_d, BLOCK_G=plan.block_g, BLOCK_N=plan.block_n,
        LEAST=LEAST_TILES, STAGES=plan.stages, MANY=plan.splits > 1, EARLY=early, EXACT=plan.exact,
        **({} if INTERPRETED else {"num_warps": WARPS, "launch_pdl": early}),
    )  # fmt: skip


def _merge(
    sums: torch.Tensor,
    stats: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
) -> None:
    rows, heads, width = out.shape
    early = launches_early(out.device)
    _merge_kernel[heads, rows](
        sums, stats, context_lens, out, plan.splits, plan.longest,
        D=width, BLOCK_D=plan.block_d, BLOCK_N=plan.block_n, LEAST=LEAST_TILES,
        SPLITS=MOST_SPLITS, EARLY=early,
        **({} if INTERPRETED else {"num_warps": WARPS, "launch_pdl": early}),
    )  # fmt: skip
