"""What every graph backend offers: capture a function, replay it, say what it launches.

A graph freezes a function's launches with their addresses and their Python values. The
invariant that makes a replay right: **a graph depends only on tensors at fixed addresses, and
on Python values that its `BatchDescriptor` determines.** The fixed tensors are declared to the
backend by name ("static"): step buffers, weights, adapter slots, the KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

Static = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]


class CaptureError(RuntimeError):
    """A function cannot be frozen, or a frozen one cannot be replayed; says where and why."""


class Graph(Protocol):
    """A frozen function, or a piece of one."""

    def replay(self) -> None:
        """Run the frozen launches on what the fixed tensors hold now."""

    def nodes(self) -> list[str]:
        """Return the names of the launches, in order."""


class Capture(Protocol):
    """One capture in progress, in one piece or several (see `minilora.graphs.piecewise`)."""

    def begin(self) -> None:
        """Freeze what is launched from now on."""

    def end(self) -> Graph:
        """Stop, and return what was launched since `begin`."""

    def finish(self) -> int:
        """Declare the capture complete; return the bytes it took beyond the shared pool."""

    def abandon(self) -> None:
        """Clean up after an exception, wherever it came from."""


@dataclass
class Captured:
    """A captured function as a whole.

    Attributes:
        graph: replays it.
        output: what the function returned: tensors that every replay overwrites.
        memory: bytes of this graph beyond the backend's shared pool.
    """

    graph: Graph
    output: Any
    memory: int

    def replay(self) -> Any:
        """Replay, and return `output`."""
        self.graph.replay()
        return self.output

    def nodes(self) -> list[str]:
        """Return the names of the launches, in order."""
        return self.graph.nodes()


class GraphBackend(ABC):
    """Captures functions into graphs that share one pool of memory.

    Graphs of one backend overwrite each other's scratch and outputs: read an output before the
    next replay, or copy it.

    Args:
        static: the fixed tensors by name, or a function that returns them (asked again by
            `check_addresses`, so that a tensor that was replaced is found).
    """

    name: str

    def __init__(self, static: Static) -> None:
        self._static, self._captured = static, False
        self._addresses: dict[str, int] = {}

    def static(self) -> Mapping[str, torch.Tensor]:
        """Return the fixed tensors by name."""
        return self._static() if callable(self._static) else self._static

    def check_addresses(self) -> None:
        """Raise a `CaptureError` that names the first fixed tensor that has moved."""
        for name, tensor in self.static().items():
            if self._captured and self._addresses.get(name) != tensor.data_ptr():
                raise CaptureError(
                    f"the fixed tensor {name!r} has moved since capture; graphs would read the old "
                    "one: copy into it, never replace it"
                )

    def fresh(self) -> GraphBackend:
        """Return a backend of the same kind and static tensors, with a pool of its own."""
        return type(self)(self._static)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run `fn` where a capture would, so that whatever it needs once is there before."""
        fn()

    def note_addresses(self) -> None:
        """Take the fixed tensors as they are before the first capture; later ones must agree.

        Raises:
            CaptureError: a tensor has moved since the first capture.
        """
        if self._captured:
            self.check_addresses()
        self._addresses = {name: tensor.data_ptr() for name, tensor in self.static().items()}
        self._captured = True

    @abstractmethod
    def start(self) -> Capture:
        """Return a new capture; `capture` is the short form for one piece."""

    @property
    @abstractmethod
    def pool_memory(self) -> int:
        """Bytes of the shared pool."""

    @abstractmethod
    def poison(self) -> None:
        """Fill the memory that graphs use as scratch with NaN: a right replay does not notice."""

    def nodes(self, graphs: Sequence[Graph]) -> list[str]:
        """Return the launches of several graphs, one after another."""
        return [node for graph in graphs for node in graph.nodes()]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same memory that does not keep it from being used again.

        An owning reference to each output would give every graph memory of its own.
        """
        return tensor

    @torch.no_grad()
    def capture(self, fn: Callable[[], Any]) -> Captured:
        """Run `fn` once and freeze it.

        Raises:
            CaptureError: `fn` does what cannot be frozen.
        """
        capture = self.start()
        try:
            capture.begin()
            output = fn()
            graph = capture.end()
            output = tree_map_only(torch.Tensor, self.alias, output)
            memory = capture.finish()
        except BaseException as error:
            capture.abandon()
            raise self.explain(error)  # noqa: B904 - it is the same error, or has it as its cause
        return Captured(graph, output, memory)

    def explain(self, error: BaseException) -> BaseException:
        """Return what to raise for an error during a capture: itself, or a `CaptureError`."""
        return error
