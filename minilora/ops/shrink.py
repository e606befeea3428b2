"""`lora_shrink`: the first half of LoRA, ``h = x @ A^T`` for the rows of every adapter.

The contract is on `lora_shrink`. On CUDA the op launches a Triton kernel (`ops/triton/shrink.py`);
elsewhere it runs in plain PyTorch (`ops/plain.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.launch_op import launch_op
from minilora.ops.plain import groups_of_grid, shrink_groups
from minilora.ops.routing import check_call
from minilora.ops.scratch import blank
from minilora.ops.triton import HAS_TRITON


def lora_shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    meta: KernelMeta,
    num_active_loras: int,
    lora_ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row by the A of its adapter, for all slices of a merged layer at once.

    Args:
        x: ``[T, in]``, any float dtype, any row stride.
        lora_a: one stacked tensor ``[max_loras, r, in]`` a slice (q, k, v of a merged layer).
        meta: routing of the same T rows.
        num_active_loras: groups in the launch grid.
        lora_ranks: int32 ``[max_loras]``, the rank in use of each slot (0: the adapter does not
            touch this layer); None means the full r.

    Returns:
        ``h``, opaque but to `lora_expand`. Every element that `lora_expand` will read is
        written, whatever was there before; so clearing happens inside the op, hence inside a
        graph (before vLLM #25914 it was cleared beside the op).

    Raises:
        ValueError: `meta` routes another number of rows than `x` has, or the grid is negative.
    """
    check_call("lora_shrink", x.shape[0], meta, num_active_loras)
    h: torch.Tensor = _shrink(x, list(lora_a), *meta.tables, lora_ranks, num_active_loras)
    return h


def _new_h(x: torch.Tensor, lora_a: list[torch.Tensor]) -> torch.Tensor:
    """Return h as the device's shrink makes it.

    Elsewhere than on CUDA: float32 ``[S, T, r]``, blank, since opcheck also compares the rows
    without an adapter, which nothing reads.
    """
    if HAS_TRITON and x.device.type == "cuda":
        from minilora.ops.triton.launch import new_h

        return new_h(x, lora_a)
    shape = (len(lora_a), x.shape[0], lora_a[0].shape[1])
    return blank(shape, torch.float32, x.device)


@launch_op("minilora::lora_shrink", fake=lambda x, lora_a, *_: _new_h(x, lora_a))
def _shrink(
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    token_lora_mapping: torch.Tensor,
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> torch.Tensor:
    tables = token_indices, active_lora_ids, num_tokens_per_lora, lora_ranks
    groups, rows = groups_of_grid(*tables, num_active_loras, lora_a[0].shape[1])
    h = _new_h(x, lora_a)
    if groups:
        shrink_groups(x, lora_a, h, groups, rows)
    return h


if HAS_TRITON:

    @torch.library.impl("minilora::lora_shrink", "cuda")
    def _shrink_on_cuda(x: torch.Tensor, lora_a: list[torch.Tensor], *routing: Any) -> torch.Tensor:
        from minilora.ops.triton.launch import Routing
        from minilora.ops.triton.shrink import shrink

        *tables, lora_ranks, num_active_loras = routing
        h: torch.Tensor = shrink(x, lora_a, Routing(*tables), lora_ranks, num_active_loras)
        return h
