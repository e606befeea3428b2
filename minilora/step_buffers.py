"""`StepBuffers`: the fixed tensors that every step is written to.

The complete padded step is built in NumPy and uploaded in one copy: there is no "update only
the first n rows", so a row cannot be stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from minilora.batch import (
    PADDING_BLOCK,
    Batch,
    BatchDescriptor,
    BatchRow,
    GraphMode,
    StepContext,
)
from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.packed import PackedInts


class StepBuffers:
    """The fixed tensors of every step, in one allocation.

    Args:
        max_num_tokens: the most rows of a step, padding included.
        max_num_seqs: the most requests of a step.
        max_blocks: the most KV blocks of one request.
        block_size: tokens in a KV block.
        max_loras: adapter slots (0 without LoRA).
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        max_loras: int,
        device: torch.device | str,
    ) -> None:
        self.block_size, self.max_blocks = block_size, max_blocks
        sizes = {
            "positions": max_num_tokens,  # first: see `minilora.model.fused.rotate`
            "input_ids": max_num_tokens,
            "slot_mapping": max_num_tokens,
            "block_tables": max_num_seqs * max_blocks,
            "context_lens": max_num_seqs,
            "sample_indices": max_num_seqs,
            **KernelMeta.sizes(max_num_tokens, max_loras, "token."),
            **KernelMeta.sizes(max_num_seqs, max_loras, "sample."),
        }
        self.packed = PackedInts(sizes, device)
        self.meta = KernelMeta(max_num_tokens, max_loras, packed=self.packed, prefix="token.")
        self.sample_meta = KernelMeta(max_num_seqs, max_loras, packed=self.packed, prefix="sample.")
        self._full_steps: dict[tuple[BatchDescriptor, int], StepContext] = {}
        self._tables = self.packed.host["block_tables"].reshape(max_num_seqs, max_blocks)

    def write(
        self, batch: Batch, descriptor: BatchDescriptor, mode: GraphMode = GraphMode.NONE
    ) -> StepContext:
        """Write the whole padded step, upload it in one copy, and return its views.

        Raises:
            ValueError: the descriptor does not fit the batch, the mode or the buffers.
        """
        rows = batch.rows
        self._check(batch, descriptor, mode)
        self._write_tokens(rows)
        self._write_requests(rows)
        sampled = self._write_samples(rows)
        self._write_routing(rows, descriptor, mode, sampled)
        self.packed.upload()
        if mode is GraphMode.FULL:
            return self._full_step(descriptor, sampled)
        return self._views(rows, descriptor, mode, sampled)

    def _check(self, batch: Batch, descriptor: BatchDescriptor, mode: GraphMode) -> None:
        full = mode is GraphMode.FULL
        if (full or descriptor.uniform) and not batch.uniform:
            raise ValueError("a uniform or FULL step is for requests with one token each")
        most = len(self._tables) if full else len(self.packed.host["input_ids"])
        if not batch.num_tokens <= descriptor.num_tokens <= most:
            raise ValueError(
                f"num_tokens={descriptor.num_tokens} must be from {batch.num_tokens} (the rows of "
                f"the batch) to {most} (the rows of the buffers)"
            )

    def _write_tokens(self, rows: Sequence[BatchRow]) -> None:
        host = self.packed.host
        host["input_ids"].fill(0)
        host["positions"].fill(0)
        host["slot_mapping"].fill(PADDING_BLOCK * self.block_size)
        single = [row for row in rows if len(row.token_ids) == 1]  # they come first
        at = len(single)
        if single:  # all at once: in a decode step these are all rows
            starts = [row.start for row in single]
            host["input_ids"][:at] = [row.token_ids[0] for row in single]
            host["positions"][:at] = starts
            blocks = [row.block_ids[row.start // self.block_size] for row in single]
            host["slot_mapping"][:at] = self._kv_slots(np.array(blocks), np.array(starts))
        for row in rows[at:]:
            end = at + len(row.token_ids)
            positions = np.arange(row.start, row.start + len(row.token_ids))
            blocks_of = np.asarray(row.block_ids)[positions // self.block_size]
            host["input_ids"][at:end] = row.token_ids
            host["positions"][at:end] = positions
            host["slot_mapping"][at:end] = self._kv_slots(blocks_of, positions)
            at = end

    def _kv_slots(
        self, blocks: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        return blocks * self.block_size + positions % self.block_size

    def _write_requests(self, rows: Sequence[BatchRow]) -> None:
        lens = self.packed.host["context_lens"]
        lens.fill(0)
        self._tables.fill(PADDING_BLOCK)
        for i, row in enumerate(rows):
            lens[i] = row.start + len(row.token_ids)
            self._tables[i, : len(row.block_ids)] = row.block_ids

    def _write_samples(self, rows: Sequence[BatchRow]) -> int:
        last, end = [], 0
        for row in rows:
            end += len(row.token_ids)
            if row.samples:
                last.append(end - 1)
        indices = self.packed.host["sample_indices"]
        indices[: len(last)] = last
        indices[len(last) :] = 0
        return len(last)

    def _write_routing(
        self, rows: Sequence[BatchRow], descriptor: BatchDescriptor, mode: GraphMode, sampled: int
    ) -> None:
        padded, count = descriptor.num_tokens, descriptor.num_active_loras
        slots = [row.lora_slot for row in rows]
        if mode is GraphMode.FULL:  # logits of all rows, so the same routing
            self.meta.write(slots, padded, count)
            self.sample_meta.reset()
            return
        self.meta.write(np.repeat(slots, [len(row.token_ids) for row in rows]), padded, count)
        sample_slots = [row.lora_slot for row in rows if row.samples]
        self.sample_meta.write(sample_slots, sampled, count)

    def _full_step(self, descriptor: BatchDescriptor, sampled: int) -> StepContext:
        """Return the step of a FULL descriptor, which says all of it: it is made only once."""
        step = self._full_steps.get((descriptor, sampled))
        if step is None:
            step = self._views((), descriptor, GraphMode.FULL, sampled)
            self._full_steps[descriptor, sampled] = step
        return step

    def _views(
        self, rows: Sequence[BatchRow], descriptor: BatchDescriptor, mode: GraphMode, sampled: int
    ) -> StepContext:
        device, full = self.packed.device, mode is GraphMode.FULL
        contexts = [row.start + len(row.token_ids) for row in rows]
        decodes = sum(len(row.token_ids) == 1 for row in rows)
        requests = descriptor.num_tokens if full else len(rows)
        longest = self.max_blocks * self.block_size if full else max(contexts[:decodes], default=0)
        tables = device["block_tables"].view(-1, self.max_blocks)[:requests]
        return StepContext(
            mode=mode,
            input_ids=device["input_ids"][: descriptor.num_tokens],
            positions=device["positions"][: descriptor.num_tokens],
            slot_mapping=device["slot_mapping"][: descriptor.num_tokens],
            block_tables=tables,
            context_lens=device["context_lens"][:requests],
            num_decodes=requests if full else decodes,
            max_context_len=longest,
            prefill_query_lens=tuple(len(row.token_ids) for row in rows[decodes:]),
            prefill_context_lens=tuple(contexts[decodes:]),
            sample_indices=device["sample_indices"][:sampled],
            meta=self.meta,
            sample_meta=self.sample_meta,
            num_active_loras=descriptor.num_active_loras,
        )
