"""`PackedInts`: named int32 tensors in one device allocation, uploaded in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

RING_DEPTH = 3  # steps whose copies may be in flight before a staging buffer is used again


class PackedInts:
    """Named one-dimensional int32 tensors that lie back to back in one allocation.

    The host side (`host[name]`, NumPy) is written freely; nothing reaches the device before
    `upload()`, which sends *everything* in one copy. So a field cannot be stale on its own.
    On CUDA the copy is asynchronous, out of a ring of pinned buffers; a pinned buffer is used
    again only after the copy out of it has finished (its event is waited for).

    Attributes:
        host: name -> int32 array, the values of the next upload.
        device: name -> int32 tensor of the same length, at an address that never changes.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device | str) -> None:
        total = sum(sizes.values())
        self._host = np.zeros(total, dtype=np.int32)
        self.tensor = torch.zeros(total, dtype=torch.int32, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self.host[name] = self._host[start : start + size]
            self.device[name] = self.tensor[start : start + size]
            start += size
        self._ring = _PinnedRing(total) if self.tensor.is_cuda else None

    def upload(self) -> None:
        """Send every field to the device in one copy (asynchronous on CUDA)."""
        if self._ring is None:
            self.tensor.copy_(torch.from_numpy(self._host))
        else:
            self._ring.send(self._host, self.tensor)


class _PinnedRing:
    """Pinned staging buffers, each guarded by the event of the last copy out of it."""

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(RING_DEPTH)
        ]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(RING_DEPTH)]
        self._next = 0

    def send(self, values: np.ndarray, target: torch.Tensor) -> None:
        turn, self._next = self._next, (self._next + 1) % RING_DEPTH
        self._copied[turn].synchronize()  # rewriting a buffer under its copy would tear the step
        self._arrays[turn][:] = values
        target.copy_(self._buffers[turn], non_blocking=True)
        self._copied[turn].record()
