"""`ModelRunner`: one step, from a batch of host lists to logits."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from minilora.batch import Batch, GraphMode, StepContext
from minilora.graphs.base import Captured, GraphBackend
from minilora.graphs.dispatcher import GraphDispatcher, GraphKey
from minilora.graphs.piecewise import PiecewiseGraph, capture_piecewise
from minilora.model.llama import Llama
from minilora.step_buffers import StepBuffers


class ModelRunner:
    """Run the model on one batch: choose a graph, write the padded step, replay.

    Args:
        model: with its weights loaded and its KV cache bound.
        buffers: the fixed tensors of every step.
        dispatcher: says which graph a batch runs with.
        backend: captures graphs; None runs every step eagerly.

    Attributes:
        graphs: what was captured, by key.
        num_steps: steps run so far, by mode.
    """

    def __init__(
        self,
        model: Llama,
        buffers: StepBuffers,
        dispatcher: GraphDispatcher,
        backend: GraphBackend | None = None,
    ) -> None:
        self.model, self.buffers = model, buffers
        self.dispatcher, self.backend = dispatcher, backend
        self.graphs: dict[GraphKey, Captured | PiecewiseGraph] = {}
        self.num_steps: Counter[GraphMode] = Counter()

    @torch.no_grad()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Compute one step.

        Returns:
            float32 logits ``[N, vocab]``, a row for each request of the batch that samples,
            in the batch's order; N may be 0. The next step may overwrite them.
        """
        key, step = self.prepare(batch)
        captured = key in self.graphs
        self.num_steps[key.mode if captured else GraphMode.NONE] += 1
        out = self.replay(key, step) if captured else self.forward(step)
        return self.sampled_logits(out, step, batch)

    def prepare(self, batch: Batch) -> tuple[GraphKey, StepContext]:
        """Choose a batch's graph and write the padded step for it."""
        key = self.dispatcher.dispatch(batch.num_tokens, batch.num_real_loras, batch.uniform)
        step = self.buffers.write(batch, key.descriptor, key.mode)
        if batch.sampled is not None:  # after the upload, which has written every row
            step.input_ids[: len(batch.rows)].copy_(batch.sampled.clamp(min=0))
        return key, step

    def forward(self, step: StepContext, depth: int | None = None) -> torch.Tensor:
        """Run what a graph of the step's mode holds: to the logits if FULL, else hidden states."""
        with self._no_autocast():
            hidden = self.model(step, depth)
            return self.model.logits(hidden, step) if step.mode is GraphMode.FULL else hidden

    def replay(self, key: GraphKey, step: StepContext) -> torch.Tensor:
        """Do the same from the graph."""
        graph = self.graphs[key]
        out: torch.Tensor
        with self._no_autocast():  # the gaps of a piecewise graph run eagerly
            out = graph.replay(step) if isinstance(graph, PiecewiseGraph) else graph.replay()
        return out

    def sampled_logits(self, out: torch.Tensor, step: StepContext, batch: Batch) -> torch.Tensor:
        """Return the logits of the rows that sample, from what `forward` or `replay` returned."""
        if step.mode is not GraphMode.FULL:
            with self._no_autocast():
                return self.model.logits(out, step)
        if all(row.samples for row in batch.rows):
            return out[: len(batch.rows)]
        return out[step.sample_indices]

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """Turn off what the caller may have on: it would change some paths and not the others."""
        device = self.buffers.packed.tensor.device.type
        on = torch.is_autocast_enabled(device)
        return torch.autocast(device, enabled=False) if on else nullcontext()

    @torch.no_grad()
    def capture(self, key: GraphKey, batch: Batch) -> None:
        """Capture the graph of `key` on a dummy batch that fits it exactly.

        One layer runs first, so that every kernel is compiled and loaded before the capture.
        """
        assert self.backend is not None
        step = self.buffers.write(batch, key.descriptor, key.mode)
        self.backend.warm_up(lambda: self.forward(step, depth=1))
        if key.mode is GraphMode.FULL:
            self.graphs[key] = self.backend.capture(lambda: self.forward(step))
        else:
            self.graphs[key] = capture_piecewise(self.backend, self.forward, step)

    def nodes(self, key: GraphKey) -> list[str]:
        """Return the launches of a graph, in order; on CUDA it is replayed for that.

        All rows are made padding first: the replay writes to no request's KV entries.
        """
        self.buffers.write(Batch(()), key.descriptor, key.mode)
        return self.graphs[key].nodes()
