"""`Arena`: the memory that the recorded graphs of one backend share.

It does after a capture what CUDA's caching allocator does during one: memory whose last reader
has run is given to the next tensor. Every graph starts with all of it free, so graphs overwrite
each other's scratch and outputs, and all of them together take about what the largest one does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Lifetime:
    """One storage that a capture made.

    Attributes:
        storage: itself; while it is held, no other memory can get its identity.
        first: the launch that made it.
        last: the last launch that touched it; infinite if it must live to the end.
        tensors: every tensor that shows it.
    """

    storage: torch.UntypedStorage
    first: int
    last: float
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes, at least one; ``out=`` may have changed them since the launch."""
        return max(1, self.storage.nbytes())

    def shown_elsewhere(self) -> bool:
        """Return whether something that the capture has not seen shows the memory.

        Such as an ``nn.Parameter`` made of a result, or the storage as an object. It would go
        on showing the old memory, so that must stay.
        """
        uses: int = torch._C._storage_Use_Count(self.storage._cdata)
        # `storage` is one use; its references are ours, torch's and the argument of getrefcount.
        return uses > len(self.tensors) + 1 or sys.getrefcount(self.storage) > 3


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

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shows memory of the arena."""
        address = tensor.untyped_storage().data_ptr()
        return any(block.data_ptr() == address for block in self._blocks)

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
