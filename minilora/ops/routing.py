"""What the plain PyTorch bodies of the LoRA ops share: walking the groups of a launch grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minilora.ops.kernel_meta import KernelMeta


def check_rows(op: str, rows: torch.Tensor, meta: KernelMeta) -> None:
    """Refuse metadata that describes other rows than the op receives."""
    described = meta.token_lora_mapping.shape[0]
    if rows.shape[0] != described:
        raise ValueError(
            f"{op} got {rows.shape[0]} rows, but its KernelMeta describes {described}; "
            "rows that were gathered need a KernelMeta of their own"
        )


def groups_of_grid(
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
) -> Iterator[tuple[int, int | None, torch.Tensor]]:
    """Yield (slot, rank, row indices) of each group that a grid of this size visits.

    A group beyond the real ones (slot -1) and a rank of 0 exit at once, as in a kernel.
    """
    slots = active_lora_ids[:num_active_loras].tolist()
    counts = num_tokens_per_lora[:num_active_loras].tolist()
    ranks = None if lora_ranks is None else lora_ranks.tolist()
    start = 0
    for slot, count in zip(slots, counts, strict=True):
        rank = None if ranks is None else ranks[slot]
        if slot >= 0 and count and rank != 0:
            yield slot, rank, token_indices[start : start + count].long()
        start += count
