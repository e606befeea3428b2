"""What LoRA costs beside a layer: our ops and other ways to do the same, on rows of one step.

On a GPU, calls on 16 sets of weights are captured in one CUDA graph, so that launches cost what
they cost in a decode step, and the graph is replayed; on a CPU they are called one after another.
Sixteen sets are what other engines' kernels were measured with, and few cases (four adapters on
gate_up, sixteen, rank 64) are more than the 50 MB of an H200's L2 cache: the figures compare
kernels, and a whole decode step (``minilora bench compare``) says what they cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_MOST_GATHERED = 2 << 30  # bytes


@dataclass
class Case:
    """One group of projections, and the rows of a step.

    Args:
        width: of the input.
        outs: of each slice of the output.
        slots: the adapter of each row, -1 for none.
        rank: of the adapters.
        max_rank: what the stacked weights hold; None: the same.
        max_loras: slots.
        dtype: of all tensors.
        device: "cpu" or "cuda".
        sets: of weights, inputs and outputs.
    """

    width: int
    outs: tuple[int, ...]
    slots: Sequence[int]
    rank: int = 16
    max_rank: int | None = None
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
        rows, rank = len(self.slots), self.max_rank or self.rank
        return [
            (
                self._normal(rows, self.width),
                self._normal(rows, sum(self.outs)),
                [self._normal(self.max_loras, rank, self.width) / self.width for _ in self.outs],
                [self._normal(self.max_loras, out, rank) for out in self.outs],
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

    @cached_property
    def lora_ranks(self) -> torch.Tensor:
        """int32 ``[L]``: the rank in use of each slot."""
        return torch.full((self.max_loras,), self.rank, dtype=torch.int32, device=self.device)

    def shrink(self, i: int = 0) -> torch.Tensor:
        """`lora_shrink` alone."""
        x, _, a, _ = self.tensors[i]
        return lora_shrink(x, a, self.meta, self.active, self.lora_ranks)

    def expand(self, h: torch.Tensor, i: int = 0) -> torch.Tensor:
        """`lora_expand` alone."""
        _, out, _, b = self.tensors[i]
        lora_expand(h, b, out, self.meta, self.active, self.lora_ranks)
        return out

    def ours(self, i: int = 0) -> torch.Tensor:
        """`lora_shrink`, `lora_expand`."""
        return self.expand(self.shrink(i), i) if self.active else self.tensors[i][1]

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

        x, out, a, _ = self.tensors[i]
        if not self.active:
            return out
        return self.expand(shrink_atomic(x, a, Routing(*self.meta.tables), self.active), i)

    def runs(self, method: str) -> bool:
        """Whether a method can run here."""
        if method == "gather_bmm":  # which copies weights for every row
            copied = len(self.slots) * self.rank * max(self.width, *self.outs)
            return copied * self.dtype.itemsize <= _MOST_GATHERED
        return method != "atomic" or self.device == "cuda"

    def microseconds(self, call: Callable[[int], object], repeats: int = 50) -> float:
        """Return the median time of one call, over the sets."""
        if self.device == "cuda":
            return _in_a_graph(lambda: [call(i) for i in range(self.sets)], repeats) / self.sets
        times = []
        for repeat in range(repeats + 3):
            start = time.perf_counter()
            call(repeat % self.sets)
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:]) * 1e6


def _in_a_graph(run: Callable[[], object], replays: int) -> float:
    """Return the median microseconds of a CUDA graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for replay in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


@torch.no_grad()
def layer(
    slots: Sequence[int],
    *,
    shape: str,
    device: str,
    methods: Iterable[str] = METHODS,
    repeats: int = 50,
    **case: int | torch.dtype | None,
) -> dict[str, dict[str, float] | None]:
    """Return microseconds of LoRA by method and group; None where a method cannot run here.

    Args:
        slots: the adapter of each row, -1 for none.
        shape: a name of `SHAPES`.
        device: "cpu" or "cuda".
        methods: names of `METHODS`.
        repeats: of each timing.
        **case: the other arguments of `Case`.
    """
    found: dict[str, dict[str, float] | None] = {method: {} for method in methods}
    sets = 16 if device == "cuda" else 4
    for group, (width, outs) in SHAPES[shape].items():
        one = Case(width, outs, slots, device=device, sets=sets, **case)  # type: ignore[arg-type]
        for method, times in found.items():
            if times is None or not one.runs(method):
                found[method] = None
            else:  # without adapters there is nothing to call
                us = one.microseconds(getattr(one, method), repeats) if one.active else 0.0
                times[group] = us
    return found
