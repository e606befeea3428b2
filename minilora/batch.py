"""What one step is: the batch on the host, its descriptor, and the views that one forward reads.

`Batch` (lists) -> `StepBuffers.write` (`step_buffers.py`) -> `StepContext`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from minilora.ops.kernel_meta import NO_LORA, KernelMeta

__all__ = [
    "NO_LORA",
    "Batch",
    "BatchDescriptor",
    "BatchRow",
    "GraphMode",
    "StepContext",
]

PADDING_BLOCK = 0  # the KV block that belongs to nobody; padding rows write to its slot 0


class GraphMode(enum.Enum):
    """How much of a step is frozen (vLLM's name is `CUDAGraphMode`).

    NONE: nothing. PIECEWISE: all but attention, which runs on the real rows between the pieces;
    the graph ends at the hidden states. FULL: everything up to the logits of every row; for
    uniform decode only.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True)
class BatchDescriptor:
    """What a step looks like to a graph: everything but the contents of its tensors.

    Attributes:
        num_tokens: rows, padding included.
        num_active_loras: groups in the grid of the LoRA ops; 0 runs no LoRA op at all.
        uniform: every request has exactly one row (pure decode).
    """

    num_tokens: int
    num_active_loras: int
    uniform: bool

    @property
    def has_lora(self) -> bool:
        """Whether the step runs the LoRA ops (vLLM #25914)."""
        return self.num_active_loras > 0


@dataclass(frozen=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        token_ids: the tokens to compute now (one when decoding, a chunk of a prompt before).
        start: tokens of the request computed before.
        block_ids: its KV blocks, enough for ``start + len(token_ids)`` tokens.
        lora_slot: its adapter's slot, or `NO_LORA`.
        samples: whether its last token's logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    lora_slot: int
    samples: bool


@dataclass(frozen=True)
class Batch:
    """The requests of one step: those with one token first, then those with more.

    Attributes:
        rows: the requests.
        sampled: ``[R]`` on the device, the token of each row of a uniform batch, where the host
            does not know it yet; it takes the place of the one in the row.
    """

    rows: tuple[BatchRow, ...]
    sampled: torch.Tensor | None = None

    def __post_init__(self) -> None:
        lengths = [len(row.token_ids) for row in self.rows]
        single = lengths.count(1)
        if 0 in lengths or any(length != 1 for length in lengths[:single]):
            raise ValueError("a Batch lists requests with one token first, none without a token")

    @cached_property
    def num_tokens(self) -> int:
        """Tokens to compute, over all requests."""
        return sum(len(row.token_ids) for row in self.rows)

    @cached_property
    def uniform(self) -> bool:
        """Whether every request has exactly one token."""
        return all(len(row.token_ids) == 1 for row in self.rows)

    @cached_property
    def num_real_loras(self) -> int:
        """Distinct adapters; ``-1`` is none."""
        return len({row.lora_slot for row in self.rows} - {NO_LORA})


@dataclass(frozen=True)
class StepContext:
    """The views that one forward reads. T rows, R requests that decode or prefill.

    In a FULL step every Python value here follows from the descriptor: padding rows count as
    requests, and `max_context_len` is the most that any step can have. In the other modes
    attention reads the real rows only, which a graph must not freeze.

    Attributes:
        mode: see `GraphMode`.
        input_ids: int32 ``[T]``; only read, see `minilora.ops.embedding`.
        positions: int32 ``[T]``, of each token in its request.
        slot_mapping: int32 ``[T]``, where each token's key and value go.
        block_tables: int32 ``[R, blocks]``; the decoding requests come first.
        context_lens: int32 ``[R]``, tokens in each context, the new ones included.
        num_decodes: requests (= rows) of the decode part.
        max_context_len: bound of the decode part's contexts.
        prefill_query_lens: new tokens of each prefilling request.
        prefill_context_lens: contexts of the same.
        sample_indices: int32 ``[N]``, the rows whose logits are wanted (a FULL step computes
            those of all rows).
        meta: adapter routing of the T rows.
        sample_meta: adapter routing of the N sampled rows, which were gathered; of no use in a
            FULL step.
        num_active_loras: groups in the grid; 0 runs no LoRA op.
    """

    mode: GraphMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    num_decodes: int
    max_context_len: int
    prefill_query_lens: tuple[int, ...]
    prefill_context_lens: tuple[int, ...]
    sample_indices: torch.Tensor
    meta: KernelMeta
    sample_meta: KernelMeta
    num_active_loras: int

    @property
    def num_attention_rows(self) -> int:
        """Rows that attend: all of a FULL step, otherwise the real ones."""
        return self.num_decodes + sum(self.prefill_query_lens)
