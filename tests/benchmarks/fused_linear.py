# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""An experiment: a matrix product of few rows that computes its LoRA update as well.

``out = x @ W^T + (x @ A[slot]^T) @ B[slot]^T`` for up to 16 rows, in one launch. The first
programs of the grid are the shrink; each leaves a partial sum and counts itself. The others each
own a tile of output columns (or a part of its width), and only where their product is done do
they wait for that count, which by then is long there. The last program of the launch sets the
counters back, so a replay finds them as the capture did. Not part of the package: see
`try_overlap.py`, which measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minilora.ops.triton.launch import INTERPRETED, next_power_of_2, three
from minilora.ops.triton.routing import one_of_three, prefetch

ROWS = 16  # a tensor core's smallest tile


@dataclass(frozen=True)
class Plan:
    """A launch: columns and width of a tile, parts of the width, warps, stages."""

    block_n: int = 32
    block_k: int = 256
    split: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0  # bytes of each weight row asked for before the kernel in front has finished


@triton.jit
def _arrive(counter):
    """Count this program, after all that it wrote; return how many came before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _wait_for(counter, count):
    """Wait until `count` programs have arrived; see all that they wrote."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def _shrink_part(
    program, x, a0, a1, a2, h, active_ids, num_rows, width, x_stride,
    R: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``h[split, slice, row, group * R + r]``: every row with every active adapter."""
    split = program % SPLITS
    piece = program // SPLITS % SLICES
    group = program // (SPLITS * SLICES)
    slot = tl.load(active_ids + group)
    r, rows = tl.arange(0, R), tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, R), tl.float32)
    if slot >= 0:
        a = one_of_three(piece, a0, a1, a2, SLICES) + slot.to(tl.int64) * (R * width)
        part = width // SPLITS
        for k0 in range(split * part, (split + 1) * part, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            inside = k < (split + 1) * part
            a_tile = tl.load(a + (r * width)[None, :] + k[:, None], mask=inside[:, None], other=0.0)
            x_mask = (rows < num_rows)[:, None] & inside[None, :]
            x_tile = tl.load(x + (rows * x_stride)[:, None] + k[None, :], mask=x_mask, other=0.0)
            if EXACT:
                a_tile, x_tile = a_tile.to(tl.float32), x_tile.to(tl.float32)
            acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    plane = h + (split * SLICES + piece) * ROWS * (GROUPS * R)
    tl.store(plane + (rows * (GROUPS * R))[:, None] + (group * R + r)[None, :], acc)


@triton.jit
def _load_b(
    column, b0, b1, b2, n0, n1, n2, active_ids, num_active,
    R: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, GROUPS * R]: B of all active adapters side by side, and the slice's number."""
    first = column * BLOCK_N
    piece = (first >= n0).to(tl.int32) + (first >= n0 + n1).to(tl.int32)
    first -= one_of_three(piece, 0, n0, n0 + n1, SLICES)
    n = one_of_three(piece, n0, n1, n2, SLICES)
    c = tl.arange(0, GROUPS * R)
    slots = tl.load(active_ids + c // R, mask=c // R < num_active, other=-1)
    rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64) * R
    b = one_of_three(piece, b0, b1, b2, SLICES)
    pointers = b + rows[:, None] + (slots.to(tl.int64) * n * R + c % R)[None, :]
    return tl.load(pointers, mask=(slots >= 0)[None, :], other=0.0), piece, slots


@triton.jit
def _load_h(
    h, piece, slots, mapping, num_rows,
    R: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """[GROUPS * R, ROWS]: the summed splits, zeros where a row is of another adapter."""
    c, rows = tl.arange(0, GROUPS * R), tl.arange(0, ROWS)
    of_row = tl.load(mapping + rows, mask=rows < num_rows, other=-1)
    mine = (slots[:, None] == of_row[None, :]) & (slots >= 0)[:, None]
    split = tl.arange(0, SPLITS)[:, None, None] * (SLICES * ROWS * GROUPS * R)
    tile = (rows * (GROUPS * R))[None, None, :] + c[None, :, None]
    # Past the L1 cache: another program wrote it in this launch.
    values = tl.load(
        h + piece * (ROWS * GROUPS * R) + split + tile,
        mask=mine[None, :, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return tl.sum(values, 0)


@triton.jit(do_not_specialize=["num_rows", "num_active"])
def _linear_kernel(
    x, w, out, a0, a1, a2, b0, b1, b2, h, partial, counters, mapping, active_ids,
    num_rows, num_active, columns, width, n0, n1, n2, x_stride, out_stride,
    R: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: GROUPS * SLICES * SPLITS programs that shrink, then column tiles x SPLIT."""
    SHRINKS: tl.constexpr = GROUPS * SLICES * SPLITS
    program = tl.program_id(0)
    tiles = columns // BLOCK_N * SPLIT
    if GROUPS:  # noqa: SIM102 (a constexpr: alone, it leaves the code out)
        if program < SHRINKS:
            if EARLY:
                gdc_wait()
                gdc_launch_dependents()
            _shrink_part(
                program, x, a0, a1, a2, h, active_ids, num_rows, width, x_stride,
                R, SLICES, SPLITS, GROUPS, 128, ROWS, EXACT,
            )  # fmt: skip
            _arrive(counters)
            return
    program -= SHRINKS
    column, split = program // SPLIT, program % SPLIT
    part = width // SPLIT
    n, rows = column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    w_rows = w + n.to(tl.int64)[:, None] * width
    if EARLY:
        if AHEAD:
            line = tl.arange(0, AHEAD // 128) * 64
            prefetch(w_rows + split * part + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if GROUPS:
        b, piece, slots = _load_b(
            column, b0, b1, b2, n0, n1, n2, active_ids, num_active, R, SLICES, GROUPS, BLOCK_N
        )
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    x_mask = (rows < num_rows)[None, :]
    for k0 in tl.range(split * part, (split + 1) * part, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        w_tile = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
        x_tile = tl.load(x + (rows * x_stride)[None, :] + k[:, None], mask=x_mask, other=0.0)
        if EXACT:
            w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
    last = True
    if SPLIT > 1:
        mine = tl.arange(0, BLOCK_N)[:, None] * ROWS + rows[None, :]
        tile = partial + column * (SPLIT * BLOCK_N * ROWS) + mine
        tl.store(tile + split * (BLOCK_N * ROWS), acc)
        last = _arrive(counters + 2 + column) == SPLIT - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(tile + other * (BLOCK_N * ROWS), cache_modifier=".cg")
            tl.store(counters + 2 + column, 0)
    if last:
        if GROUPS:
            _wait_for(counters, SHRINKS)
            delta = _load_h(h, piece, slots, mapping, num_rows, R, SLICES, SPLITS, GROUPS, ROWS)
            if EXACT:
                acc = tl.dot(b.to(tl.float32), delta, acc, input_precision="ieee")
            else:
                high = delta.to(tl.bfloat16)
                acc = tl.dot(b, (delta - high.to(tl.float32)).to(tl.bfloat16), acc)
                acc = tl.dot(b, high, acc)
        target = out + rows[None, :] * out_stride + n[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), mask=x_mask)
    if GROUPS:  # noqa: SIM102 (as above)
        if _arrive(counters + 1) == tiles - 1:  # nobody is left who counts
            tl.store(counters, 0)
            tl.store(counters + 1, 0)


class FusedLinear:
    """A weight ``[N, K]`` and its stacks; call it with rows and routing."""

    def __init__(
        self, weight: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor],
        splits: int = 8,
    ) -> None:  # fmt: skip
        self.weight, self.a, self.b, self.splits = weight, list(lora_a), list(lora_b), splits
        device = weight.device
        tiles = weight.shape[0] // 16
        self.counters = torch.zeros(2 + tiles, dtype=torch.int32, device=device)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, mapping: torch.Tensor, active_ids: torch.Tensor,
        num_active: int, plan: Plan,
    ) -> torch.Tensor:  # fmt: skip
        """Write ``[T, N]`` for ``x [T, K]``, at most 16 rows."""
        columns, width = self.weight.shape
        groups = next_power_of_2(num_active) if num_active else 0
        slices, rank = len(self.a), self.a[0].shape[1]
        size = (self.splits, slices, ROWS, max(1, groups) * rank)
        h = torch.empty(size, dtype=torch.float32, device=x.device)
        parts = columns * ROWS * plan.split if plan.split > 1 else 1
        partial = torch.empty(parts, dtype=torch.float32, device=x.device)
        widths = [b.shape[1] for b in self.b]
        if any(n % plan.block_n for n in widths) or width % (plan.split * plan.block_k):
            raise ValueError(f"{plan} does not divide {widths} columns of width {width}")
        programs = groups * slices * self.splits + columns // plan.block_n * plan.split
        early = not INTERPRETED
        options = {"num_warps": plan.warps, "launch_pdl": early}
        _linear_kernel[(programs,)](
            x, self.weight, out, *three(self.a), *three(self.b), h, partial, self.counters,
            mapping, active_ids, x.shape[0], num_active, columns, width, *[*widths, 0, 0][:3],
            x.stride(0), out.stride(0),
            R=rank, SLICES=slices, SPLITS=self.splits, GROUPS=groups,
            BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT=plan.split, STAGES=plan.stages,
            AHEAD=plan.ahead, EARLY=early, EXACT=INTERPRETED, ROWS=ROWS,
            **({} if INTERPRETED else options),
        )  # fmt: skip
        return out
