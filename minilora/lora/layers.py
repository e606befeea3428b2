"""Layers that hold a base weight and one stack of adapter weights a slice.

Each layer knows the full names of the modules it serves (a merged layer: several), so that
checkpoints and adapters find their place by name. Slot weights have fixed addresses: a slot is
zeroed and copied into, never allocated anew.

Legend: T rows, S slices, L slots (`max_loras`), r rank (`max_lora_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from minilora.batch import StepContext
from minilora.lora.adapter import LoraWeights
from minilora.ops.embedding import lora_embedding_shrink
from minilora.ops.expand import lora_expand
from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.shrink import lora_shrink


@dataclass(frozen=True)
class LayerOptions:
    """What every layer of one model shares; ``max_loras=0`` builds layers without LoRA."""

    dtype: torch.dtype
    device: torch.device
    max_loras: int = 0
    max_lora_rank: int = 0

    def empty(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised weight; the loader proves that every one is filled."""
        weight = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(weight, requires_grad=False)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return a stack of empty adapter slots."""
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)


class LoraLayer(nn.Module):
    """The slots of one layer; subclasses add the base weight and the forward.

    Attributes:
        names: full module name of each slice.
        lora_a_stacked: a tensor ``[L, r, in]`` a slice.
        lora_b_stacked: a tensor ``[L, out_s, r]`` a slice, with the scaling folded in.
        lora_ranks: int32 ``[L]``, the rank in use of each slot, 0 where the adapter does not
            touch this layer.
    """

    def __init__(
        self, names: Sequence[str], a_shape: tuple[int, int], outs: Sequence[int], o: LayerOptions
    ) -> None:
        super().__init__()
        self.names, self.outs = tuple(names), tuple(outs)
        rank, slots = o.max_lora_rank, o.max_loras
        self.lora_a_stacked = [o.zeros(slots, *a_shape) for _ in outs]
        self.lora_b_stacked = [o.zeros(slots, out, rank) for out in outs]
        self.lora_ranks = torch.zeros(slots, dtype=torch.int32, device=o.device)

    def write_slot(self, slot: int, modules: Mapping[str, LoraWeights]) -> None:
        """Replace what is in a slot: zero all of it, then copy in what the adapter has."""
        rank = 0
        slices = zip(self.names, self.lora_a_stacked, self.lora_b_stacked, strict=True)
        for name, a_stacked, b_stacked in slices:
            a_stacked[slot].zero_()
            b_stacked[slot].zero_()
            if name in modules:
                weights = modules[name]
                rank = max(rank, weights.r)
                self._write_a(a_stacked[slot], weights)
                b_stacked[slot, :, : weights.r].copy_(weights.b.float() * weights.scaling)
        self.lora_ranks[slot] = rank

    def _write_a(self, target: torch.Tensor, weights: LoraWeights) -> None:
        target[: weights.r].copy_(weights.a)

    def slot_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stacks by name; their addresses never change."""
        for name, a, b in zip(self.names, self.lora_a_stacked, self.lora_b_stacked, strict=True):
            yield f"lora_a_stacked[{name}]", a
            yield f"lora_b_stacked[{name}]", b
        yield "lora_ranks", self.lora_ranks

    @property
    def shape_key(self) -> tuple[torch.Size, ...]:
        """What layers of the same shapes have in common."""
        return tuple(x.shape for x in (*self.lora_a_stacked, *self.lora_b_stacked))

    def rows_to_warm_up(self, most_rows: int, num_active_loras: int) -> list[int]:
        """Return row counts that together make every LoRA kernel this layer can need on CUDA."""
        from minilora.ops.triton.launch import rows_to_warm_up

        return rows_to_warm_up(
            most_rows, num_active_loras, self.lora_a_stacked, self.lora_b_stacked
        )

    def _add_lora(
        self, x: torch.Tensor, out: torch.Tensor, meta: KernelMeta, num_active_loras: int
    ) -> None:
        if num_active_loras:
            h = lora_shrink(x, self.lora_a_stacked, meta, num_active_loras, self.lora_ranks)
            lora_expand(h, self.lora_b_stacked, out, meta, num_active_loras, self.lora_ranks)


class LoraMergedLinear(LoraLayer):
    """Several projections of the same input as one: q, k, v of attention; gate, up of the MLP."""

    def __init__(
        self, names: Sequence[str], inputs: int, outs: Sequence[int], bias: bool, o: LayerOptions
    ) -> None:
        super().__init__(names, (o.max_lora_rank, inputs), outs, o)
        self.weight = o.empty(sum(outs), inputs)
        self.bias = o.empty(sum(outs)) if bias else None

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """``[T, in] -> [T, sum of outs]``, the slices side by side."""
        out = linear(x, self.weight, self.bias)
        self._add_lora(x, out, step.meta, step.num_active_loras)
        return out

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in a checkpoint, the rows of the merged weight it fills)."""
        start = 0
        for name, out in zip(self.names, self.outs, strict=True):
            yield f"{name}.weight", self.weight[start : start + out]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + out]
            start += out


class LoraLinear(LoraMergedLinear):
    """One projection."""

    def __init__(self, name: str, inputs: int, out: int, bias: bool, o: LayerOptions) -> None:
        super().__init__([name], inputs, [out], bias, o)


class LoraEmbedding(LoraLayer):
    """The token embedding. Its A is stored transposed, ``[L, vocab, r]``: a row a token."""

    def __init__(self, name: str, vocab: int, hidden: int, o: LayerOptions) -> None:
        super().__init__([name], (vocab, o.max_lora_rank), [hidden], o)
        self.weight = o.empty(vocab, hidden)

    def forward(self, step: StepContext) -> torch.Tensor:
        """Return ``[T, H]`` for the step's token ids, which are only read."""
        out = embedding(step.input_ids, self.weight)
        if step.num_active_loras:
            h = lora_embedding_shrink(step.input_ids, self.lora_a_stacked[0], step.meta)
            count, ranks = step.num_active_loras, self.lora_ranks
            lora_expand(h, self.lora_b_stacked, out, step.meta, count, ranks)
        return out

    def _write_a(self, target: torch.Tensor, weights: LoraWeights) -> None:
        target[:, : weights.r].copy_(weights.a.T)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the one tensor of a checkpoint."""
        yield f"{self.names[0]}.weight", self.weight


class LoraLmHead(LoraLayer):
    """The output projection, on all rows or on sampled ones, which have routing of their own."""

    def __init__(
        self, name: str, hidden: int, vocab: int, o: LayerOptions, tied: nn.Parameter | None
    ) -> None:
        super().__init__([name], (o.max_lora_rank, hidden), [vocab], o)
        self.tied = tied is not None
        self.weight = o.empty(vocab, hidden) if tied is None else tied

    def forward(self, x: torch.Tensor, meta: KernelMeta, num_active_loras: int) -> torch.Tensor:
        """``[N, H] -> [N, vocab]`` float32 logits; `meta` routes these N rows."""
        logits = linear(x, self.weight).float()
        self._add_lora(x, logits, meta, num_active_loras)
        return logits

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the one tensor of a checkpoint, none where it is the embedding's."""
        if not self.tied:
            yield f"{self.names[0]}.weight", self.weight
