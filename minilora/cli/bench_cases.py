"""What `minilora bench kernels` times: one layer's LoRA, by our ops and by other ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from minilora.ops import NO_LORA, KernelMeta, lora_expand, lora_shrink

# in -> out of each slice, for the four groups of projections of a layer
SHAPES: Mapping[str, Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "llama-3.1-8b": {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate_up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
    },
    "smollm2": {
        "qkv": (576, (576, 192, 192)),
        "o": (576, (576,)),
        "gate_up": (576, (1536, 1536)),
        "down": (1536, (576,)),
    },
}
METHODS = ("ours", "adapter_loop", "gather_bmm", "atomic")
_MOST_GATHERED = 2 << 30  # bytes; gather + bmm copies the weights of every row


@dataclass
class Case:
    """One group of projections: `slots` gives the adapter of each row, -1 for none.

    Legend: T rows, S slices, L slots, r rank.
    """

    width: int
    outs: tuple[int, ...]
    slots: Sequence[int]
    rank: int = 16
    max_loras: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    sets: int = 1

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @cached_property
    def tensors(
        self,
    ) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
        """(x, out, A, B) of each set."""
        rows, stack = len(self.slots), (self.max_loras, self.rank)
        return [
            (
                self._normal(rows, self.width),
                self._normal(rows, sum(self.outs)),
                [self._normal(*stack, self.width) / self.width for _ in self.outs],
                [self._normal(self.max_loras, out, self.rank) for out in self.outs],
            )
            for _ in range(self.sets)
        ]

    @property
    def active(self) -> int:
        """Distinct adapters, which is the launch grid."""
        return len(set(self.slots) - {NO_LORA})

    @cached_property
    def meta(self) -> KernelMeta:
        """The routing tables of these rows."""
        meta = KernelMeta(len(self.slots), self.max_loras, self.device)
        meta.prepare(list(self.slots), len(self.slots), self.active)
        return meta

    @cached_property
    def rows_of_slot(self) -> dict[int, torch.Tensor]:
        """The rows of each adapter in use."""
        return {
            slot: torch.tensor(
                [row for row, own in enumerate(self.slots) if own == slot], device=self.device
            )
            for slot in sorted(set(self.slots) - {NO_LORA})
        }

    def ours(self, i: int = 0) -> torch.Tensor:
        """`lora_shrink`, `lora_expand`."""
        x, out, a, b = self.tensors[i]
        if self.active:
            lora_expand(lora_shrink(x, a, self.meta, self.active), b, out, self.meta, self.active)
        return out

    def adapter_loop(self, i: int = 0) -> torch.Tensor:
        """Two matrix products for each adapter and slice."""
        x, out, a_slices, b_slices = self.tensors[i]
        pieces = out.split(self.outs, dim=1)
        for slot, rows in self.rows_of_slot.items():
            x_rows = x[rows]
            for a, b, piece in zip(a_slices, b_slices, pieces, strict=True):
                piece.index_add_(0, rows, x_rows @ a[slot].T @ b[slot].T)
        return out

    def gather_bmm(self, i: int = 0) -> torch.Tensor:
        """Copy each row's weights, then two batched products."""
        x, out, a_slices, b_slices = self.tensors[i]
        pieces = out.split(self.outs, dim=1)
        for a, b, piece in zip(a_slices, b_slices, pieces, strict=True):
            h = torch.einsum("tk,trk->tr", x[self._served], a[self._slots])
            piece.index_add_(0, self._served, torch.einsum("tr,tnr->tn", h, b[self._slots]))
        return out

    @cached_property
    def _served(self) -> torch.Tensor:
        rows = [row for row, slot in enumerate(self.slots) if slot != NO_LORA]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @cached_property
    def _slots(self) -> torch.Tensor:
        slots = [slot for slot in self.slots if slot != NO_LORA]
        return torch.tensor(slots, dtype=torch.long, device=self.device)

    def atomic(self, i: int = 0) -> torch.Tensor:
        """The classical split-K shrink with atomic adds (Triton only), then our expand."""
        from minilora.ops.triton.launch import Routing
        from minilora.ops.triton.shrink_atomic import shrink_atomic

        x, out, a, b = self.tensors[i]
        if self.active:
            h = shrink_atomic(x, a, Routing(*self.meta.tables), self.active)
            lora_expand(h, b, out, self.meta, self.active)
        return out

    @property
    def gathered_bytes(self) -> int:
        """What `gather_bmm` copies for its largest slice."""
        return len(self.slots) * self.rank * max(self.width, *self.outs) * self.dtype.itemsize

    def microseconds(self, call: Callable[[int], object], repeats: int) -> float:
        """Return the time of one call: in a graph over all sets on a GPU, plain on a CPU."""
        if self.device == "cuda":
            from minilora.ops.triton.bench import Workload

            return Workload("o", 1, 1, sets=self.sets).microseconds(call, repeats)
        times = []
        for repeat in range(repeats + 3):
            start = time.perf_counter()
            call(repeat % self.sets)
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:]) * 1e6


@torch.no_grad()
def layer(
    slots: Sequence[int],
    *,
    shape: str,
    rank: int,
    max_loras: int,
    dtype: torch.dtype,
    device: str,
    repeats: int,
) -> dict[str, float | None]:
    """Return microseconds of one layer's LoRA by method; None where one cannot run here."""
    totals: dict[str, float | None] = dict.fromkeys(METHODS, 0.0)
    sets = 16 if device == "cuda" else 4
    for width, outs in SHAPES[shape].values():
        case = Case(width, outs, slots, rank, max_loras, dtype, device, sets)
        for method in METHODS:
            runs = device == "cuda" or method != "atomic"
            if method == "gather_bmm" and case.gathered_bytes > _MOST_GATHERED:
                runs = False
            total = totals[method]
            if not runs or total is None:
                totals[method] = None
            elif case.active:  # without adapters there is nothing to call
                totals[method] = total + case.microseconds(getattr(case, method), repeats)
    return {name: None if us is None else round(us, 1) for name, us in totals.items()}
