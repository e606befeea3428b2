"""`Arena`: the memory that the recorded graphs of one backend share.

It does after a capture what CUDA's caching allocator does during one: memory whose last reader
has run is given to the next tensor. Every graph starts with all of it free, so graphs overwrite
each other's scratch and outputs, and all of them together take about what the largest one does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class Lifetime:
    """One storage that a capture made.

    Attributes:
        size: bytes.
        first: the launch that made it.
        last: the last launch that touched it; infinite if it must live to the end.
        tensors: every tensor that shows it.
    """

    size: int
    first: int
    last: float
    tensors: list[torch.Tensor] = field(default_factory=list)


class Arena:
    """Blocks of memory, and which tensors of a capture lie in which."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []  # uint8, each on the device it was asked for

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block) for block in self._blocks)

    def poison(self) -> None:
        """Fill all of it with bytes that are NaN in every float type."""
        for block in self._blocks:
            block.fill_(0xFF)

    def place(self, lifetimes: Iterable[Lifetime]) -> None:
        """Move the tensors of one capture into the arena."""
        free, busy = list(self._blocks), list[tuple[float, torch.Tensor]]()
        for life in sorted(lifetimes, key=lambda life: life.first):
            free += [block for last, block in busy if last < life.first]
            busy = [(last, block) for last, block in busy if last >= life.first]
            block = self._take(free, life)
            busy.append((life.last, block))
            for tensor in life.tensors:
                _move(tensor, block)

    def _take(self, free: list[torch.Tensor], life: Lifetime) -> torch.Tensor:
        """Return the smallest free block that is large enough, or a new one."""
        device = life.tensors[0].device
        fits = [b for b in free if len(b) >= life.size and b.device == device]
        if not fits:
            block = torch.empty(life.size, dtype=torch.uint8, device=device)
            self._blocks.append(block)
            return block
        best = min(fits, key=len)
        del free[next(index for index, block in enumerate(free) if block is best)]
        return best


def _move(tensor: torch.Tensor, block: torch.Tensor) -> None:
    """Let a tensor show the same bytes of another storage, with what they hold."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    tensor.set_(block.untyped_storage(), offset, shape, stride)
