"""Fill everything that a step must not depend on with NaN or garbage.

A step depends on its real rows, on the KV entries of its requests and on the slots of its
adapters. What else there is, is poison's: if a real row changes by one bit, something read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from minilora.batch import Batch, StepContext
from minilora.ops.scratch import poison_

if TYPE_CHECKING:
    from minilora.engine.llm import LLM

POISON = ("stale_buffers", "padding_rows", "unowned_kv", "dead_slots", "graph_scratch")
_GARBAGE = 0x7F7F7F7F


class Poison:
    """The fillings, one method each, for one engine.

    Args:
        llm: whose memory to fill.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._runner = llm, llm.runner
        self._generator = torch.Generator().manual_seed(0)

    def stale_buffers(self) -> None:
        """Fill the step's buffers on host and device; the next `StepBuffers.write` must undo it."""
        packed = self._runner.buffers.packed
        for array in packed.host.values():
            array.fill(_GARBAGE)
        packed.tensor.fill_(_GARBAGE)

    def padding_rows(self, step: StepContext, num_tokens_real: int) -> None:
        """Give the padding rows of a written step other tokens at other positions."""
        padding = slice(num_tokens_real, None)
        limits = {
            "input_ids": self._llm.model_config.vocab_size,
            "positions": self._llm.max_model_len,
        }
        for name, limit in limits.items():
            rows = getattr(step, name)[padding]
            rows.copy_(torch.randint(limit, rows.shape, generator=self._generator))

    def unowned_kv(self, batch: Batch) -> None:
        """Fill every KV entry that no running request has computed or computes now."""
        cache = self._llm.kv_cache
        block_size = cache.block_size
        owned = torch.zeros(cache.tensor.shape[2] * block_size, dtype=torch.bool)
        contexts = [(row.block_ids, row.start + len(row.token_ids)) for row in batch.rows]
        running = self._llm.scheduler.running
        contexts += [(request.block_ids, request.num_computed) for request in running]
        for block_ids, length in contexts:
            for index, block in enumerate(block_ids):
                held = max(0, min(block_size, length - index * block_size))
                owned[block * block_size : block * block_size + held] = True
        blocks = cache.tensor.flatten(2, 3)  # [layers, 2, blocks * block_size, Hkv, D]
        blocks[:, :, ~owned.to(blocks.device)] = math.nan

    @contextmanager
    def dead_slots(self, batch: Batch) -> Iterator[None]:
        """Fill the slots of all adapters that the step does not use; give them back at the end."""
        alive = {row.lora_slot for row in batch.rows}
        saved = []
        for layer in self._runner.model.lora_layers():
            for tensor in (*layer.lora_a_stacked, *layer.lora_b_stacked, layer.lora_ranks):
                for slot in set(range(len(tensor))) - alive:
                    saved.append((tensor[slot], tensor[slot].clone()))
                    poison_(tensor[slot])
        try:
            yield
        finally:
            for place, value in saved:
                place.copy_(value)

    def graph_scratch(self) -> None:
        """Fill the memory that graphs use between their inputs and outputs."""
        if self._runner.backend is not None:
            self._runner.backend.poison()


@contextmanager
def poisoned(llm: LLM, *what: str) -> Iterator[None]:
    """Poison an engine before every step; its answers must stay the same, bit for bit.

    Args:
        llm: an engine. Whoever uses it meanwhile is served as ever.
        what: names from `POISON`; none means all of them.

    Raises:
        ValueError: an unknown name.
    """
    chosen = what or POISON
    if unknown := set(chosen) - set(POISON):
        raise ValueError(f"poisoned knows {', '.join(POISON)}, not {min(unknown)!r}")
    poison, runner, plain = Poison(llm), llm.runner, llm.runner.execute

    def execute(batch: Batch) -> torch.Tensor:
        if "stale_buffers" in chosen:
            poison.stale_buffers()
        if "unowned_kv" in chosen:
            poison.unowned_kv(batch)
        if "graph_scratch" in chosen:
            poison.graph_scratch()
        if "dead_slots" not in chosen:
            return plain(batch)
        with poison.dead_slots(batch):
            return plain(batch)

    write = runner.buffers.write

    def write_and_poison(batch: Batch, *rest: object) -> StepContext:
        step = write(batch, *rest)  # type: ignore[arg-type]
        if "padding_rows" in chosen:
            poison.padding_rows(step, batch.num_tokens)
        return step

    runner.execute = execute  # type: ignore[method-assign]
    runner.buffers.write = write_and_poison  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        runner.execute = plain  # type: ignore[method-assign]
        runner.buffers.write = write  # type: ignore[method-assign]
