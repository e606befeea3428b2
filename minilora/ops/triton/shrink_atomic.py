# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The classical split-K shrink, with atomic adds: for teaching and comparison only.

Every split adds its part into one buffer, in whatever order the machine runs them. Two things
follow. The buffer must be zeros before: vLLM #25914 had to decide who clears it, and when (in
the op, so in a graph with adapters, and not at all in one without). And floating-point addition
is not associative, so two runs of one batch can differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minilora.ops.triton.launch import INTERPRETED, Routing, next_power_of_2
from minilora.ops.triton.routing import rows_by_tile

BLOCK_M, BLOCK_K = 16, 128


@triton.jit(do_not_specialize=["num_tokens", "num_active"])
def _shrink_atomic_kernel(
    x, a, h, order, active_ids, counts, num_tokens, num_active, width, x_stride,
    R: tl.constexpr, R_PAD: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, tiles)."""
    split, tile = tl.program_id(0), tl.program_id(1)
    slot, _, rows, mine = rows_by_tile(
        tile, active_ids, counts, order, counts, num_active, R, BLOCK_M, GROUPS, False
    )
    if slot < 0:
        return
    r = tl.arange(0, R_PAD)
    x_rows = x + rows.to(tl.int64) * x_stride
    a_rows = a + slot.to(tl.int64) * (R * width) + r * width
    acc = tl.zeros((BLOCK_M, R_PAD), tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < width
        a_mask = inside[:, None] & (r < R)[None, :]
        a_tile = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
        x_mask = mine[:, None] & inside[None, :]
        x_tile = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0)
        if EXACT:
            a_tile, x_tile = a_tile.to(tl.float32), x_tile.to(tl.float32)
        acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    h_tile = h + (rows * R)[:, None] + r[None, :]
    tl.atomic_add(h_tile, acc, mask=mine[:, None] & (r < R)[None, :], sem="relaxed")


def shrink_atomic(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    routing: Routing,
    num_active_loras: int,
    splits: int = 8,
    h: torch.Tensor | None = None,
    reset: bool = True,
) -> torch.Tensor:
    """Return ``h`` ``[slices, T, r]`` by atomic adds (one launch a slice, all ranks full).

    Args:
        x: ``[T, in]``.
        lora_a: one stacked tensor ``[max_loras, r, in]`` a slice.
        routing: the tables of the same T rows.
        num_active_loras: groups in the launch grid.
        splits: parts of the width that add into one element.
        h: the buffer to use again, as a graph would; None makes one.
        reset: clear the buffer first. False is the fault: what it held before is added.
    """
    num_tokens, width = x.shape
    rank = lora_a[0].shape[1]
    shape = (len(lora_a), num_tokens, rank)
    buffer = torch.empty(shape, dtype=torch.float32, device=x.device) if h is None else h
    if reset:
        buffer.zero_()
    active = routing.groups(num_active_loras)
    if not active:
        return buffer
    tiles = -(-num_tokens // BLOCK_M) + min(active, num_tokens) - 1
    for a, target in zip(lora_a, buffer, strict=True):
        _shrink_atomic_kernel[(splits, tiles)](
            x, a, target, routing.order, routing.active_ids, routing.counts,
            num_tokens, active, width, x.stride(0),
            R=rank, R_PAD=max(16, next_power_of_2(rank)), STEPS=-(-width // (splits * BLOCK_K)),
            GROUPS=next_power_of_2(active), BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K,
            EXACT=INTERPRETED or x.dtype != a.dtype,
        )  # fmt: skip
    return buffer
