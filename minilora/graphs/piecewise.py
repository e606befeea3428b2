"""Graphs with gaps: capture is broken at attention and resumed after it.

Attention reads the lengths of the real requests, which differ from step to step, so no graph may
freeze it unless every request has one row. A piecewise graph is therefore a list of pieces with
an eager call between each two. The model marks the gaps with `outside_graph`, which is the only
function here that looks for a running capture; everything else is told what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from minilora.batch import StepContext
from minilora.graphs.base import Capture, Graph, GraphBackend

GapFunction = Callable[[torch.Tensor, StepContext], torch.Tensor]

_running: ContextVar[_Recording | None] = ContextVar("minilora_piecewise_capture", default=None)


def outside_graph(fn: GapFunction, x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Run ``fn(x, step)`` outside of a piecewise graph; at each replay with the step of then.

    In a FULL capture and without one this is a plain call.

    Args:
        fn: takes all rows of `x` and returns its result for the first rows, those that are real.
        x: ``[T, ...]``, padding rows included.
        step: the step being run.

    Returns:
        ``[T, ...]``, zeros in the rows that `fn` did not return.
    """
    capture = _running.get()
    if capture is not None:
        return capture.leave_gap(fn, x, step)
    y = fn(x, step)
    if len(y) == len(x):
        return y
    out = x.new_empty(len(x), *y.shape[1:])
    _copy_rows(y, out)
    return out


def _copy_rows(y: torch.Tensor, out: torch.Tensor) -> None:
    """Write every row of `out`: a row that keeps what it had would be stale."""
    out[: len(y)].copy_(y)
    out[len(y) :].zero_()


@dataclass(frozen=True)
class _Gap:
    """The eager call after a piece."""

    fn: GapFunction
    x: torch.Tensor
    out: torch.Tensor

    def run(self, step: StepContext) -> None:
        _copy_rows(self.fn(self.x, step), self.out)


class PiecewiseGraph:
    """A captured step with gaps.

    Attributes:
        output: what the function returned; every replay overwrites it.
        memory: bytes of all pieces beyond the backend's shared pool.
    """

    def __init__(self, recording: _Recording, output: Any, memory: int) -> None:
        self._backend = recording.backend
        self._pieces, self._gaps = recording.pieces, recording.gaps
        self.output, self.memory = output, memory

    def replay(self, step: StepContext) -> Any:
        """Run the pieces, and in each gap its function on the *current* step."""
        for piece, gap in zip(self._pieces, self._gaps, strict=False):
            piece.replay()
            gap.run(step)
        self._pieces[-1].replay()
        return self.output

    def nodes(self) -> list[str]:
        """Return the launches of all pieces in order, those in the gaps not included."""
        return self._backend.nodes(self._pieces)

    @property
    def num_pieces(self) -> int:
        """Pieces, one more than gaps."""
        return len(self._pieces)


class _Recording:
    """What `outside_graph` finds while a piecewise capture runs."""

    def __init__(self, backend: GraphBackend, capture: Capture) -> None:
        self.backend, self._capture = backend, capture
        self.pieces: list[Graph] = []
        self.gaps: list[_Gap] = []

    def leave_gap(self, fn: GapFunction, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        out = torch.empty_like(x)  # in the graph's memory: the next piece reads it there
        self.pieces.append(self._capture.end())
        gap = _Gap(fn, self.backend.alias(x), self.backend.alias(out))
        gap.run(step)
        self.gaps.append(gap)
        self._capture.begin()
        return out


@torch.no_grad()
def capture_piecewise(
    backend: GraphBackend, fn: Callable[[StepContext], Any], step: StepContext
) -> PiecewiseGraph:
    """Run ``fn(step)`` once and freeze it, but for the calls it makes through `outside_graph`.

    Raises:
        CaptureError: `fn` does what cannot be frozen, outside of the gaps.
    """
    capture = backend.start()
    recording = _Recording(backend, capture)
    token = _running.set(recording)
    try:
        capture.begin()
        output = fn(step)
        recording.pieces.append(capture.end())
        output = tree_map_only(torch.Tensor, backend.alias, output)
        memory = capture.finish()
    except BaseException as error:
        capture.abandon()
        raise backend.explain(error)  # noqa: B904 - it is the same error, or has it as its cause
    finally:
        _running.reset(token)
    return PiecewiseGraph(recording, output, memory)
