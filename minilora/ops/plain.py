"""The LoRA ops in plain PyTorch: the bodies of `shrink` and `expand` where no kernel runs.

They emulate the launch grid of a kernel: ``range(num_active_loras)`` groups and no more are
visited, so that a grid that is too small gives wrong numbers on a CPU too.

Rows are sorted by adapter once, so that a group is a run of rows. In a batch whose groups have
the same number of rows and the same rank, in neighbouring slots (a decode batch with one request
an adapter, say), all groups are one batched product; otherwise each is a product of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """The rows of one adapter: ``start..stop`` of the sorted rows."""

    slot: int
    rank: int
    start: int
    stop: int


def groups_of_grid(
    token_indices: torch.Tensor,
    active_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_ranks: torch.Tensor | None,
    num_active_loras: int,
    max_rank: int,
) -> tuple[list[Group], torch.Tensor]:
    """Return the groups that a grid of this size visits, and their rows, one after another.

    A group beyond the real ones (slot -1) and a rank of 0 exit at once, as in a kernel.
    """
    slots = active_lora_ids[:num_active_loras].tolist()
    counts = num_tokens_per_lora[:num_active_loras].tolist()
    ranks = None if lora_ranks is None else lora_ranks.tolist()
    groups: list[Group] = []
    runs: list[torch.Tensor] = []
    start = stop = 0
    for slot, count in zip(slots, counts, strict=True):
        rank = max_rank if ranks is None else ranks[slot]
        if slot >= 0 and count and rank:
            groups.append(Group(slot, rank, stop, stop + count))
            runs.append(token_indices[start : start + count])
            stop += count
        start += count
    rows = token_indices[:start] if stop == start else torch.cat(runs or [token_indices[:0]])
    return groups, rows.long()


def shrink_groups(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    h: torch.Tensor,
    groups: Sequence[Group],
    rows: torch.Tensor,
) -> None:
    """Write ``h[s, row, :rank] = x[row] @ A_s[slot, :rank]^T`` for the rows of every group.

    Args:
        x: ``[T, in]``.
        lora_a: a tensor ``[L, r, in]`` a slice.
        h: float32 ``[S, T, r]``.
        groups: as `groups_of_grid` returns them.
        rows: int64 ``[n]``, the rows of the groups.
    """
    x_rows = x.index_select(0, rows).float()  # [n, in]
    rank = max(group.rank for group in groups)
    h_rows = h.new_zeros(h.shape[0], len(rows), rank)  # [S, n, rank]
    block = _block(groups)
    for a, h_slice in zip(lora_a, h_rows, strict=True):
        if block is not None:
            a_t = a[block, :rank].float().transpose(1, 2)  # [G, in, rank]
            torch.bmm(_split(x_rows, groups), a_t, out=_split(h_slice, groups))
            continue
        for slot, own, start, stop in groups:
            h_slice[start:stop, :own] = x_rows[start:stop] @ a[slot, :own].float().T
    h[:, :, :rank].index_copy_(1, rows, h_rows)


def expand_groups(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    out: torch.Tensor,
    groups: Sequence[Group],
    rows: torch.Tensor,
) -> None:
    """Add ``h[s, row, :rank] @ B_s[slot, :, :rank]^T`` to the rows of every group, in place.

    Args:
        h: float32 ``[S, T, r]``.
        lora_b: a tensor ``[L, out_s, r]`` a slice.
        out: ``[T, sum of out_s]``; the sum is made in float32 and rounded once.
        groups: as `groups_of_grid` returns them.
        rows: int64 ``[n]``, the rows of the groups.
    """
    h_rows = h.index_select(1, rows)  # [S, n, r]
    total = out.index_select(0, rows).float()  # [n, sum of out_s]
    block, rank = _block(groups), groups[0].rank
    columns = torch.split(total, [b.shape[1] for b in lora_b], dim=1)
    for b, h_slice, total_slice in zip(lora_b, h_rows, columns, strict=True):
        if block is not None:
            b_t = b[block, :, :rank].float().transpose(1, 2)  # [G, rank, out_s]
            _split(total_slice, groups).baddbmm_(_split(h_slice[:, :rank], groups), b_t)
            continue
        for slot, own, start, stop in groups:
            total_slice[start:stop].addmm_(h_slice[start:stop, :own], b[slot, :, :own].float().T)
    out.index_copy_(0, rows, total.to(out.dtype))


def _block(groups: Sequence[Group]) -> slice | None:
    """Return the slots of the groups as a slice, if all groups are alike and neighbours."""
    first = groups[0]
    count = first.stop - first.start
    for index, (slot, rank, start, stop) in enumerate(groups):
        if slot != first.slot + index or rank != first.rank or stop - start != count:
            return None
    return slice(first.slot, first.slot + len(groups))


def _split(rows: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """View sorted rows ``[n, width]`` as ``[G, n / G, width]``."""
    return rows.view(len(groups), -1, rows.shape[-1])
