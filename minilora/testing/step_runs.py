"""Run one step several ways from the same state, and say how two results differ."""

from __future__ import annotations

import dataclasses

import torch

from minilora.batch import PADDING_BLOCK, Batch, GraphMode, StepContext
from minilora.engine.llm import LLM
from minilora.graphs.dispatcher import GraphKey
from minilora.testing.expected_step import sampled_rows
from minilora.testing.faults import Fault, FaultKind
from minilora.testing.poison import Poison

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN equals the same NaN."""
    bits = _BITS[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite where one is NaN and the other is not."""
    error = (a.double() - b.double()).abs()
    both = a.isnan() & b.isnan()
    return float(
        torch.where(error.isnan() & ~both, torch.inf, error).nan_to_num(0.0, torch.inf).max()
    )


class StepRuns:
    """One written step, to be run more than once.

    The step's buffers and the KV cache are put back before every run, so that each starts from
    the same state; a run that writes where it must not is noted in `faults`.

    Args:
        llm: the engine, right after `ModelRunner.prepare`.
        key: the step's graph.
        step: the written step.
        batch: what it was written from.
    """

    def __init__(self, llm: LLM, key: GraphKey, step: StepContext, batch: Batch) -> None:
        self._runner, self._llm = llm.runner, llm
        self._key, self._step, self._batch = key, step, batch
        self._inputs = llm.runner.buffers.packed.tensor
        self._cache = llm.kv_cache.tensor  # [layers, 2, blocks, block_size, Hkv, D]
        self._inputs_before, self._cache_before = self._inputs.clone(), self._cache.clone()
        self._cache_eager = self._cache_before
        self.num_real = batch.num_tokens
        self.faults: list[Fault] = []

    def eager(self) -> torch.Tensor:
        """Run without a graph; nothing but the step's own KV entries may be written."""
        out = self._runner.forward(self._step).clone()
        self._check_written("eagerly")
        self._cache_eager = self._cache.clone()
        return out

    def sampled(self, out: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rows that sample, worked out from the batch."""
        rows = torch.tensor(sampled_rows(self._batch), device=out.device, dtype=torch.long)
        picked, step = out[rows], self._step
        if step.mode is GraphMode.FULL:
            return picked
        head: torch.Tensor
        head = self._runner.model.lm_head(picked, step.sample_meta, step.num_active_loras)
        return head

    def replay(self) -> torch.Tensor:
        """Run from the graph."""
        self.restore()
        out = self._runner.replay(self._key, self._step).clone()
        self._check_written("by the replay")
        after, want = self._cache[:, :, 1:], self._cache_eager[:, :, 1:]  # 0: the padding block
        if not same_bits(after, want):
            self._fault(FaultKind.WRONG_KV, f"in {self._key.mode.name} {self._key.descriptor}")
        return out

    def poisoned_replay(self, poison: Poison) -> torch.Tensor:
        """Run from the graph with poison in everything that the step must not read."""
        self.restore()
        poison.padding_rows(self._step, self.num_real)
        poison.unowned_kv(self._batch)
        poison.graph_scratch()
        with poison.dead_slots(self._batch):
            return self._runner.replay(self._key, self._step).clone()

    def restore(self) -> None:
        """Put back the step's buffers and the KV cache."""
        self._inputs.copy_(self._inputs_before)
        self._cache.copy_(self._cache_before)

    def _check_written(self, how: str) -> None:
        for name, field in self._runner.buffers.packed.device.items():
            start = field.storage_offset()
            if not torch.equal(field, self._inputs_before[start : start + len(field)]):
                self._fault(FaultKind.INPUT_WRITTEN, f"{name}, {how}")
        bits = _BITS[self._cache.element_size()]
        changed = self._cache.view(bits) != self._cache_before.view(bits)
        entries = changed.flatten(4).any(-1).any(0).any(0).flatten()  # [blocks * block_size]
        block_size = self._cache.shape[3]
        own = self._own_entries(block_size)
        for entry in entries.nonzero().flatten().tolist():
            block = entry // block_size
            if block != PADDING_BLOCK and entry not in own:
                text = f"block {block}, entry {entry % block_size}, {how}"
                self._fault(FaultKind.FOREIGN_KV, text)

    def _own_entries(self, block_size: int) -> set[int]:
        return {
            row.block_ids[position // block_size] * block_size + position % block_size
            for row in self._batch.rows
            for position in range(row.start, row.start + len(row.token_ids))
        }

    def _fault(self, kind: FaultKind, detail: str) -> None:
        if not any(fault.kind is kind for fault in self.faults):
            self.faults.append(Fault(kind, detail))

    # ---- what a difference means

    def where(self, got: torch.Tensor, want: torch.Tensor) -> str:
        """Say which row of two results differs most, and how."""
        error = (got.double() - want.double()).abs()
        worst = torch.where(error.isnan(), torch.inf, error).flatten(1).amax(1)
        row = int(worst.argmax())
        kind = f"row {row}" if row < self.num_real else f"padding row {row}"
        first = got[row].flatten()[int(torch.where(error.isnan(), torch.inf, error)[row].argmax())]
        return (
            f"{kind} of {len(got)} is off by up to {float(worst[row]):.3g} (one value: "
            f"{float(first):.3g}) in {self._key.mode.name} {self._key.descriptor}"
        )

    def diagnose(self, got: torch.Tensor, want: torch.Tensor) -> Fault:
        """Name why a replay that repeats itself is not what eager execution gives."""
        where = self.where(got, want)
        if got.isnan().any() and not want.isnan().any():
            # NaN lies in the graph's scratch and in KV entries of nobody: which was read?
            self.restore()
            self._cache.nan_to_num_(0.0)
            still = self._runner.replay(self._key, self._step).isnan().any()
            return Fault(FaultKind.UNWRITTEN_MEMORY if still else FaultKind.FROZEN_VALUE, where)
        if self._step.num_active_loras:
            self.restore()
            base = self._runner.forward(dataclasses.replace(self._step, num_active_loras=0))
            differ = [row for row in range(len(got)) if not same_bits(got[row], want[row])]
            if same_bits(got[differ], base[differ]):
                return Fault(FaultKind.ADAPTER_DROPPED, f"{where}; rows {differ} equal the base")
        return Fault(FaultKind.FROZEN_VALUE, where)
