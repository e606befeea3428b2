"""Measure the LoRA kernels on one GPU, and tune their table of launch configurations.

Every figure is made in the same way: calls on 16 sets of weights are captured in one CUDA
graph, so that launches cost what they cost in a decode step; the graph is replayed 50 times, and
the median is divided by 16. Sixteen sets are what other engines' kernels were measured with, and
few cases (four adapters on gate_up, sixteen, rank 64) are more than the 50 MB of an H200's L2
cache: the figures compare kernels, and a whole decode step (``minilora bench compare``) says what
they cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.triton.expand import expand
from minilora.ops.triton.launch import Routing, architecture, table
from minilora.ops.triton.shrink import shrink
from minilora.ops.triton.shrink_atomic import shrink_atomic

# in -> out of each slice, for the four launches of a layer
LLAMA_3_1_8B: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


@dataclass
class Workload:
    """One group of projections: `rows` rows dealt in turn to `adapters` adapters.

    `rank` is the adapters' own, `max_rank` what the stacked weights hold (None: the same).
    """

    group: str
    rows: int
    adapters: int
    slots: int = 4
    rank: int = 16
    max_rank: int | None = None
    sets: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @cached_property
    def weights(self) -> list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
        """(out, A, B) of each set."""
        width, outs = LLAMA_3_1_8B[self.group]
        rank = self.max_rank or self.rank
        return [
            (
                self._normal(self.rows, sum(outs)),
                [self._normal(self.slots, rank, width) / 64 for _ in outs],
                [self._normal(self.slots, out, rank) for out in outs],
            )
            for _ in range(self.sets)
        ]

    @cached_property
    def x(self) -> list[torch.Tensor]:
        """The input of each set, [rows, in]."""
        width = LLAMA_3_1_8B[self.group][0]
        return [self._normal(self.rows, width) for _ in range(self.sets)]

    @cached_property
    def slot_of_row(self) -> list[int]:
        """The slot of each row."""
        return [row % self.adapters for row in range(self.rows)]

    @cached_property
    def routing(self) -> Routing:
        """The tables of these rows."""
        meta = KernelMeta(self.rows, self.slots, self.device)
        meta.prepare(self.slot_of_row, self.rows, self.adapters)
        return Routing(
            meta.token_lora_mapping,
            meta.token_indices_sorted_by_lora_ids,
            meta.active_lora_ids,
            meta.num_tokens_per_lora,
        )

    @cached_property
    def ranks(self) -> torch.Tensor:
        """int32 [slots]."""
        return torch.full((self.slots,), self.rank, dtype=torch.int32, device=self.device)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def shrink(self, i: int) -> torch.Tensor:
        """Shrink with set i."""
        return shrink(self.x[i], self.weights[i][1], self.routing, self.ranks, self.adapters)

    def expand(self, i: int, h: torch.Tensor) -> None:
        """Expand with set i."""
        out, _, b = self.weights[i]
        expand(h, b, out, self.routing, self.ranks, self.adapters)

    def ours(self, i: int) -> None:
        """Shrink and expand with set i."""
        self.expand(i, self.shrink(i))

    def atomic(self, i: int) -> None:
        """The classical variant: split-K with atomic adds and a reset."""
        h = shrink_atomic(self.x[i], self.weights[i][1], self.routing, self.adapters)
        self.expand(i, h)

    def gather_einsum(self, i: int) -> None:
        """Gather each row's weights, then two batched products."""
        out, a_slices, b_slices = self.weights[i]
        slots, column = self.routing.mapping.long(), 0
        for a, b in zip(a_slices, b_slices, strict=True):
            h = torch.einsum("tk,trk->tr", self.x[i], a[slots])
            out[:, column : column + b.shape[1]] += torch.einsum("tr,tnr->tn", h, b[slots])
            column += b.shape[1]

    @cached_property
    def _rows_of_adapter(self) -> list[torch.Tensor]:
        rows = torch.arange(self.rows, device=self.device)
        return [rows[slot :: self.adapters] for slot in range(self.adapters)]

    def adapter_loop(self, i: int) -> None:
        """Two matrix products for each adapter and slice."""
        out, a_slices, b_slices = self.weights[i]
        column = 0
        for a, b in zip(a_slices, b_slices, strict=True):
            piece = out[:, column : column + b.shape[1]]
            for slot, rows in enumerate(self._rows_of_adapter):
                piece.index_add_(0, rows, self.x[i][rows] @ a[slot].T @ b[slot].T)
            column += b.shape[1]

    def microseconds(self, call: Callable[[int], object], replays: int = 50) -> float:
        """Return the time of one call: the median of `replays` replays, over the sets."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.sets):
                call(i)
        times: list[float] = []
        for replay in range(replays + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                times.append(start.elapsed_time(end) * 1e3 / self.sets)
        return statistics.median(times)


def layer(method: str = "ours", replays: int = 50, **workload: Any) -> dict[str, float]:
    """Return microseconds of the four groups of one layer, and of all ("layer")."""
    times = {}
    for group in LLAMA_3_1_8B:
        work = Workload(group, **workload)
        times[group] = round(work.microseconds(getattr(work, method), replays), 2)
    times["layer"] = round(sum(times.values()), 2)
    return times


# (rows of a tile, rows of the step, adapters) for each class of the table. Wide layers have
# entries of their own.
_SHRINK_CLASSES = [(1, 8, 4), (8, 32, 4), (16, 64, 4), (32, 128, 4), (64, 2048, 4)]
_EXPAND_CLASSES = [(1, 8, 4), (8, 32, 4), (16, 64, 4), (32, 2048, 4)]


def tune(name: str = "cuda") -> dict[str, Any]:
    """Return a new table for this GPU: for each class of tiles the fastest of a few launches."""
    entries: dict[str, list[dict[str, int]]] = {"shrink": [], "expand": []}
    for rows, tokens, adapters in _SHRINK_CLASSES:
        for group, width in (("qkv", 0), ("down", 8192)):
            work = Workload(group, tokens, adapters)
            best = _fastest("shrink", rows, width, work, work.shrink)
            entries["shrink"].append(best)
    for rows, tokens, adapters in _EXPAND_CLASSES:
        for group, width in (("qkv", 0), ("gate_up", 16384)):
            work = Workload(group, tokens, adapters)
            h = work.shrink(0)
            best = _fastest("expand", rows, width, work, partial(_expand_again, work, h))
            entries["expand"].append(best)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return {**table(architecture(torch.device(name))), "machine": machine, **entries}


def _expand_again(work: Workload, h: torch.Tensor, i: int) -> None:
    work.expand(i, h)


def _fastest(
    kernel: str, rows: int, width: int, work: Workload, call: Callable[[int], object]
) -> dict[str, int]:
    timed = []
    for candidate in _candidates(kernel, rows):
        with _only(kernel, candidate):
            timed.append((work.microseconds(call, 20), candidate))
    best = min(timed, key=lambda pair: pair[0])[1]
    return {**best, "rows": rows, "width": width}


def _candidates(kernel: str, rows: int) -> Iterator[dict[str, int]]:
    base = {"rows": 64, "width": 0}
    if kernel == "expand":
        for block_n, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8)):
            yield {**base, "block_n": block_n, "warps": warps}
        return
    blocks: Sequence[tuple[int, int]] = ((128, 2), (256, 2), (256, 4), (512, 4))
    if rows == 64:
        blocks = ((64, 4), (128, 4), (128, 8))
    for block_k, warps in blocks:
        for stages in (3, 4):
            yield {**base, "block_k": block_k, "warps": warps, "stages": stages}


@contextmanager
def _only(kernel: str, entry: dict[str, int]) -> Iterator[None]:
    """Let every launch of a kernel use one entry."""
    data: Any = table(architecture(torch.device("cuda", torch.cuda.current_device())))
    kept = data[kernel]
    data[kernel] = [entry]
    try:
        yield
    finally:
        data[kernel] = kept
