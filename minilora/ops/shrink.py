"""`lora_shrink`: the first half of LoRA, ``h = x @ A^T`` for the rows of every adapter.

The contract is on `lora_shrink`. The body below is plain PyTorch and runs on any device. It
emulates the launch grid of a kernel: it visits ``range(num_active_loras)`` groups and no more,
so that a grid that is too small gives wrong numbers on a CPU too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.routing import check_rows, groups_of_grid


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
        graph (vLLM #25914 cleared it outside the ops, for every graph).

    Raises:
        ValueError: `meta` routes another number of rows than `x` has (vLLM issue 51121).
    """
    check_rows("lora_shrink", x, meta)
    h: torch.Tensor = _shrink(
        x,
        list(lora_a),
        meta.token_indices_sorted_by_lora_ids,
        meta.active_lora_ids,
        meta.num_tokens_per_lora,
        lora_ranks,
        num_active_loras,
    )
    return h


@torch.library.custom_op("minilora::lora_shrink", mutates_args=())
def _shrink(
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> torch.Tensor:
    h = _new_h(x, lora_a)
    groups = groups_of_grid(
        token_indices, active_lora_ids, num_tokens_per_lora, lora_ranks, num_active_loras
    )
    for slot, rank, rows in groups:
        x_rows = x.index_select(0, rows).float()  # [n, in]
        for a, h_slice in zip(lora_a, h, strict=True):
            h_slice[:, :rank].index_copy_(0, rows, x_rows @ a[slot, :rank].float().T)
    return h


@_shrink.register_fake
def _shrink_shape(
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> torch.Tensor:
    return _new_h(x, lora_a)


def _new_h(x: torch.Tensor, lora_a: list[torch.Tensor]) -> torch.Tensor:
    """[S, T, r] float32; zeros, since opcheck compares what no adapter's row writes, too."""
    return x.new_zeros(len(lora_a), x.shape[0], lora_a[0].shape[1], dtype=torch.float32)
