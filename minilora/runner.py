"""`ModelRunner`: one step, from a batch of host lists to logits."""

from __future__ import annotations

import torch

from minilora.batch import Batch, BatchDescriptor, StepBuffers
from minilora.model.llama import Llama


class ModelRunner:
    """Run the model on one batch.

    Args:
        model: with its weights loaded and its KV cache bound.
        buffers: the fixed tensors of every step.
        max_loras: adapter slots, 0 without LoRA.
        specialize_lora: a step without adapters runs no LoRA op (vLLM #25914).
        specialize_active_lora: the grid has the step's own number of adapters (vLLM #32005).
    """

    def __init__(
        self,
        model: Llama,
        buffers: StepBuffers,
        *,
        max_loras: int,
        specialize_lora: bool = True,
        specialize_active_lora: bool = True,
    ) -> None:
        self.model, self.buffers, self._max_loras = model, buffers, max_loras
        self._specialize_lora = specialize_lora
        self._specialize_active_lora = specialize_active_lora

    @torch.no_grad()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Compute one step.

        Returns:
            float32 logits ``[N, vocab]``, a row for each request of the batch that samples,
            in the batch's order; N may be 0.
        """
        step = self.buffers.write(batch, self.describe(batch))
        hidden = self.model(step)
        return self.model.logits(hidden, step)

    def describe(self, batch: Batch) -> BatchDescriptor:
        """Return the descriptor that the batch runs with (no padding without graphs)."""
        return BatchDescriptor(batch.num_tokens, self._lora_grid(batch), batch.uniform)

    def _lora_grid(self, batch: Batch) -> int:
        count = batch.num_real_loras
        if count == 0 and self._specialize_lora:
            return 0
        return count if self._specialize_active_lora else self._max_loras
