"""`lora_expand`: the second half of LoRA, ``out += h @ B^T`` for the rows of every adapter.

As in `shrink.py`, a Triton kernel runs on CUDA and plain PyTorch elsewhere. The scaling
``alpha / r`` is folded into B when an adapter is written to its slot, so it does not appear here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.launch_op import launch_op
from minilora.ops.plain import expand_groups, groups_of_grid
from minilora.ops.routing import check_call
from minilora.ops.triton import HAS_TRITON


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

    On Hopper and newer the kernel reads `lora_b`, `meta` and `lora_ranks` while the operation right
    before it still runs, so that operation must not write them; `h` and `out` it may.

    Args:
        h: what `lora_shrink` returned for the same rows, in the layout it has.
        lora_b: one stacked tensor ``[max_loras, out_s, r]`` a slice.
        out: ``[T, sum of out_s]``, the slices side by side; any row stride.
        meta: routing of the same T rows.
        num_active_loras: groups in the launch grid.
        lora_ranks: as for `lora_shrink`.

    Raises:
        ValueError: `meta` routes another number of rows than `out` or `h` has, the grid is
            negative, or (where the kernel runs) `h` has another shape or layout.
    """
    for num_rows in (out.shape[0], h.shape[-2]):
        check_call("lora_expand", num_rows, meta, num_active_loras)
    _expand(h, list(lora_b), out, *meta.tables, lora_ranks, num_active_loras)


@launch_op("minilora::lora_expand", fake=lambda *_: None, mutates_args=("out",))
def _expand(
    h: torch.Tensor,
    lora_b: list[torch.Tensor],
    out: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> None:
    tables = token_indices, active_lora_ids, num_tokens_per_lora, lora_ranks
    groups, rows = groups_of_grid(*tables, num_active_loras, lora_b[0].shape[2])
    if groups:
        expand_groups(h, lora_b, out, groups, rows)


if HAS_TRITON:

    @torch.library.impl("minilora::lora_expand", "cuda")
    def _expand_on_cuda(
        h: torch.Tensor, lora_b: list[torch.Tensor], out: torch.Tensor, *routing: Any
    ) -> None:
        from minilora.ops.triton.expand import expand
        from minilora.ops.triton.launch import Routing

        *tables, lora_ranks, num_active_loras = routing
        expand(h, lora_b, out, Routing(*tables), lora_ranks, num_active_loras)
