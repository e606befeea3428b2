"""The LoRA ops in plain PyTorch: the bodies of `shrink` and `expand` where no kernel runs.

They emulate the launch grid of a kernel: ``range(num_active_loras)`` groups and no more are
visited, so that a grid that is too small gives wrong numbers on a CPU too.

Rows are sorted by adapter once, so that a group is a run of rows. Neighbouring groups with the
same number of rows and the same rank, in neighbouring slots, are one batched product: all of a
decode batch with one request an adapter, say. On a CPU a call costs more than its work does there.
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
    for alike in _alike(groups):
        slots, own, some = _slots(alike), alike[0].rank, _rows(alike)
        x_block = x_rows[some].view(len(alike), -1, x.shape[1])  # [G, m, in]
        for a, h_slice in zip(lora_a, h_rows, strict=True):
            a_t = a[slots, :own].float().transpose(1, 2)  # [G, in, own]
            h_block = h_slice[some].view(len(alike), -1, rank)[..., :own]
            torch.bmm(x_block, a_t, out=h_block)
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
    columns = torch.split(total, [b.shape[1] for b in lora_b], dim=1)
    for alike in _alike(groups):
        slots, own, some = _slots(alike), alike[0].rank, _rows(alike)
        for b, h_slice, total_slice in zip(lora_b, h_rows, columns, strict=True):
            b_t = b[slots, :, :own].float().transpose(1, 2)  # [G, own, out_s]
            h_block = h_slice[some, :own].view(len(alike), -1, own)
            total_slice[some].view(len(alike), -1, b.shape[1]).baddbmm_(h_block, b_t)
    out.index_copy_(0, rows, total.to(out.dtype))


def _alike(groups: Sequence[Group]) -> list[list[Group]]:
    """Split the groups into runs that differ in nothing but that each has the next slot."""
    runs = [[groups[0]]]
    for group in groups[1:]:
        before = runs[-1][-1]
        same = group.rank == before.rank and group.stop - group.start == before.stop - before.start
        if same and group.slot == before.slot + 1:
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def _slots(alike: Sequence[Group]) -> slice:
    return slice(alike[0].slot, alike[-1].slot + 1)


def _rows(alike: Sequence[Group]) -> slice:
    return slice(alike[0].start, alike[-1].stop)
