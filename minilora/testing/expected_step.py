"""What the fixed tensors must hold for a batch, worked out again in plain Python.

Written from the contracts, and not with `StepBuffers` or `KernelMeta`: a fault there cannot
hide here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minilora.batch import NO_LORA, PADDING_BLOCK, Batch, BatchDescriptor, GraphMode, StepContext
from minilora.ops.kernel_meta import KernelMeta
from minilora.testing.faults import Fault, FaultKind


def check_step(
    step: StepContext, batch: Batch, descriptor: BatchDescriptor, block_size: int
) -> list[Fault]:
    """Compare every row of a written step, padding included, with what it must hold."""
    faults = []
    for name, want in _expected(step, batch, descriptor, block_size).items():
        got = getattr(step, name).tolist()
        if len(got) != len(want):
            text = f"{name} has {len(got)} rows, not {len(want)}"
            faults.append(Fault(FaultKind.STALE_STEP, text))
            continue
        faults += [
            Fault(FaultKind.STALE_STEP, f"{name}[{row}] is {value}, not {right}")
            for row, (value, right) in enumerate(zip(got, want, strict=True))
            if value != right
        ][:1]
    slots = [row.lora_slot for row in batch.rows for _ in row.token_ids]
    faults += _check_routing("meta", step.meta, slots, descriptor.num_tokens)
    if step.mode is not GraphMode.FULL:
        sampled = [row.lora_slot for row in batch.rows if row.samples]
        faults += _check_routing("sample_meta", step.sample_meta, sampled, len(sampled))
    return faults


def _expected(
    step: StepContext, batch: Batch, descriptor: BatchDescriptor, block_size: int
) -> dict[str, list[Any]]:
    ids, positions, kv_slots, contexts, tables = [], [], [], [], []
    width = step.block_tables.shape[1]
    for row in batch.rows:
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            block = row.block_ids[position // block_size]
            ids.append(token)
            positions.append(position)
            kv_slots.append(block * block_size + position % block_size)
        contexts.append(row.start + len(row.token_ids))
        tables.append(_padded(list(row.block_ids), width, PADDING_BLOCK))
    rows = descriptor.num_tokens
    requests = rows if step.mode is GraphMode.FULL else len(batch.rows)
    return {
        "input_ids": _padded(ids, rows, 0),
        "positions": _padded(positions, rows, 0),
        "slot_mapping": _padded(kv_slots, rows, PADDING_BLOCK * block_size),
        "context_lens": _padded(contexts, requests, 0),
        "block_tables": _padded(tables, requests, [PADDING_BLOCK] * width),
        "sample_indices": sampled_rows(batch),
    }


def sampled_rows(batch: Batch) -> list[int]:
    """Return the last row of each request that samples."""
    rows, end = [], 0
    for row in batch.rows:
        end += len(row.token_ids)
        if row.samples:
            rows.append(end - 1)
    return rows


def _padded(values: list[Any], length: int, filler: Any) -> list[Any]:
    return values + [filler] * (length - len(values))


def _check_routing(
    name: str, meta: KernelMeta, slots: Sequence[int], num_tokens: int
) -> list[Fault]:
    """Groups are real adapters and come first; rows without one are in no group."""
    active = sorted(set(slots) - {NO_LORA})
    rows_of = {slot: [row for row, s in enumerate(slots) if s == slot] for slot in active}
    counts = [len(rows_of[slot]) for slot in active]
    want = {
        "token_lora_mapping": _padded(list(slots), num_tokens, NO_LORA),
        "active_lora_ids": _padded(list(active), meta.max_loras, NO_LORA),
        "num_tokens_per_lora": _padded(list(counts), meta.max_loras, 0),
        "lora_token_start_loc": [sum(counts[:group]) for group in range(meta.max_loras + 1)],
    }
    faults = [
        Fault(FaultKind.WRONG_ROUTING, f"{name}.{field} is {got}, not {right}")
        for field, right in want.items()
        if (got := getattr(meta, field).tolist()) != right
    ]
    routed = meta.token_indices_sorted_by_lora_ids.tolist()
    if routed[: sum(counts)] != [row for slot in active for row in rows_of[slot]]:
        faults.append(Fault(FaultKind.WRONG_ROUTING, f"{name} sorts the rows as {routed}"))
    return faults
