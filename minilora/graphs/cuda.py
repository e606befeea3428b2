"""CUDA graphs on `torch.cuda.CUDAGraph`, behind the same protocol as the recorder.

What is easy to get wrong, and is settled here once: capture runs on a side stream that waits for
the work before it; all graphs share one memory pool (so their scratch is paid for once); the
pool's memory is not held by Python references to outputs; and no garbage collection may free
CUDA memory in the middle of a capture.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from minilora.graphs.base import Capture, CaptureError, Graph, GraphBackend, Static
from minilora.graphs.refusals import where


class CudaGraph:
    """A piece of a step as a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def nodes(self) -> list[str]:
        """Replay once under the profiler and return the kernels and copies in order of start."""
        return _launches([self])


class CudaBackend(GraphBackend):
    """Captures CUDA graphs from one memory pool.

    Args:
        static: the fixed tensors by name, see `GraphBackend`.
        device: the CUDA device.
    """

    name = "cuda"

    def __init__(self, static: Static, device: torch.device | str = "cuda") -> None:
        super().__init__(static)
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def fresh(self) -> CudaBackend:
        """Return a backend of the same static tensors, with a pool of its own."""
        return CudaBackend(self._static, self.device)

    def start(self) -> Capture:
        """Return a new capture on the side stream."""
        self.note_addresses()
        return _CudaCapture(self)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run `fn` on the side stream: cuBLAS keeps a workspace a stream, and takes it there."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            fn()
        current.wait_stream(self.stream)

    def nodes(self, graphs: Sequence[Graph]) -> list[str]:
        """Return the launches of several graphs; starting the profiler once is much faster."""
        return _launches(graphs)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same memory that does not own it."""
        return _alias(tensor)

    @property
    def pool_memory(self) -> int:
        """Bytes of the shared pool."""
        return sum(segment["total_size"] for segment in self._segments())

    def explain(self, error: BaseException) -> BaseException:
        """Name the line that did what CUDA does not capture: torch's message is far from it."""
        if not isinstance(error, RuntimeError) or "captur" not in str(error):
            return error
        reason = str(error).splitlines()[0]
        explained = CaptureError(f"{where(error)}: this cannot be captured ({reason})")
        explained.__cause__ = error
        return explained

    def poison(self) -> None:
        """Fill the pool with bytes that are NaN in every float type.

        Between two replays all of it is scratch: a graph that reads what it has not written
        gets NaN.
        """
        for segment in self._segments():
            _bytes_at(segment["address"], segment["total_size"], self.device).fill_(0xFF)

    def _segments(self) -> list[dict[str, Any]]:
        snapshot = torch.cuda.memory_snapshot()
        return [s for s in snapshot if tuple(s["segment_pool_id"]) == tuple(self.pool)]


class _CudaCapture:
    """One capture; the side stream is current from the first `begin` to the end."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._on_stream: AbstractContextManager[Any] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gc_enabled = False
        self._before = 0

    def begin(self) -> None:
        backend = self._backend
        if self._on_stream is None:
            self._gc_enabled = gc.isenabled()
            gc.disable()  # a collection may free CUDA memory, which invalidates a capture
            backend.stream.wait_stream(torch.cuda.current_stream(backend.device))
            self._on_stream = torch.cuda.stream(backend.stream)
            self._on_stream.__enter__()
            self._before = _driver_bytes(backend.device)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread may use the device meanwhile.
        self._graph.capture_begin(pool=backend.pool, capture_error_mode="thread_local")

    def end(self) -> CudaGraph:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return CudaGraph(graph)

    def finish(self) -> int:
        assert self._on_stream is not None
        self._on_stream.__exit__(None, None, None)
        self._on_stream = None
        if self._gc_enabled:
            gc.enable()
        torch.cuda.current_stream(self._backend.device).wait_stream(self._backend.stream)
        return max(0, _driver_bytes(self._backend.device) - self._before)

    def abandon(self) -> None:
        if self._graph is not None:
            with suppress(RuntimeError):  # the capture was invalid, so it is abandoned
                self._graph.capture_end()
            self._graph = None
        if self._on_stream is not None:
            self.finish()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Keep the garbage collector from running while graphs are captured.

    A collection may free CUDA memory in the middle of a capture, which invalidates it; and one a
    graph over all objects of the process is most of the time of a capture.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _driver_bytes(device: torch.device) -> int:
    """Return the bytes in use that are not torch's own: contexts, modules, graphs."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _launches(graphs: Sequence[Graph]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    # A profiler that is torn down and started again can crash the process where there are graphs
    # (kineto pull 748, PyTorch pull 112507); these keep it in place.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if str(e.device_type) == "DeviceType.CUDA"]
    return [event.name for event in sorted(events, key=lambda e: e.time_range.start)]


class _Foreign:
    """Memory that torch is to show but not to own (numba's array interface)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Foreign(address, size), device=device)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _bytes_at(tensor.data_ptr(), extent * tensor.element_size(), tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
