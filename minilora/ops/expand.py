"""`lora_expand`: the second half of LoRA, ``out += h @ B^T`` for the rows of every adapter.

As in `shrink.py`, the body emulates the launch grid. The scaling ``alpha / r`` is folded into
B when an adapter is written to its slot, so it does not appear here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.routing import check_rows, groups_of_grid


def lora_expand(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    out: torch.Tensor,
    meta: KernelMeta,
    num_active_loras: int,
    lora_ranks: torch.Tensor | None = None,
) -> None:
    """Add each row's LoRA update to `out` in place.

    Rows of no group are left untouched, bit for bit. The sum is made in float32 and rounded
    once to the dtype of `out`.

    Args:
        h: what `lora_shrink` returned for the same rows.
        lora_b: one stacked tensor ``[max_loras, out_s, r]`` a slice.
        out: ``[T, sum of out_s]``, the slices side by side; any row stride.
        meta: routing of the same T rows.
        num_active_loras: groups in the launch grid.
        lora_ranks: as for `lora_shrink`.

    Raises:
        ValueError: `meta` routes another number of rows than `out` has.
    """
    check_rows("lora_expand", out, meta)
    _expand(
        h,
        list(lora_b),
        out,
        meta.token_indices_sorted_by_lora_ids,
        meta.active_lora_ids,
        meta.num_tokens_per_lora,
        lora_ranks,
        num_active_loras,
    )


@torch.library.custom_op("minilora::lora_expand", mutates_args=("out",))
def _expand(
    h: torch.Tensor,
    lora_b: list[torch.Tensor],
    out: torch.Tensor,
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> None:
    groups = groups_of_grid(
        token_indices, active_lora_ids, num_tokens_per_lora, lora_ranks, num_active_loras
    )
    slices = torch.split(out, [b.shape[1] for b in lora_b], dim=1)
    for slot, rank, rows in groups:
        for b, h_slice, out_slice in zip(lora_b, h, slices, strict=True):
            h_rows = h_slice[:, :rank].index_select(0, rows)  # [n, rank]
            update = h_rows @ b[slot, :, :rank].float().T  # [n, out_s]
            total = out_slice.index_select(0, rows).float() + update
            out_slice.index_copy_(0, rows, total.to(out.dtype))


@_expand.register_fake
def _expand_nothing(
    h: torch.Tensor,
    lora_b: list[torch.Tensor],
    out: torch.Tensor,
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> None:
    return None
