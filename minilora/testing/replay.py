"""`check_replay`: the harness for a function that is not ours: your kernel, your layer.

It asks the same as `StepChecker` asks of a whole engine: that a graph follows its inputs, that it
resets what it accumulates, that it reads only what it wrote or was given, that it leaves its
inputs alone, and that what is in padding rows does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from minilora.graphs.base import Captured, CaptureError, GraphBackend
from minilora.graphs.cuda import CudaBackend
from minilora.graphs.recorded import RecordedBackend
from minilora.ops.scratch import poison_
from minilora.testing.faults import Fault, FaultFound, FaultKind
from minilora.testing.step_runs import same_bits

Tensors = Mapping[str, torch.Tensor]


def make_backend(name: str, static: Tensors) -> GraphBackend:
    """Return the graph backend of a name, "recorded" or "cuda".

    Args:
        name: of the backend.
        static: the fixed tensors by name; their device is the graphs'.
    """
    if name == "cuda":
        device = next(iter(static.values())).device
        return CudaBackend(static, device)
    return RecordedBackend(static)


@torch.no_grad()
def check_replay(
    fn: Callable[[], Any],
    inputs: Tensors,
    steps: Iterable[Tensors],
    *,
    state: Tensors | None = None,
    scratch: Tensors | None = None,
    real_rows: Sequence[int] | None = None,
    backend: str = "recorded",
) -> int:
    """Capture `fn` on the first step and check its replay on every step.

    Args:
        fn: reads `inputs` and `state` and returns a tensor, or several. Kernels called from it
            should take their scratch from `minilora.ops.scratch`, so that it can be poisoned.
        inputs: the buffers that a step writes and `fn` only reads, by name.
        steps: for each step, what to write to every one of `inputs`.
        state: fixed tensors besides: weights, and what `fn` may write (a KV cache). They are put
            back before every run.
        scratch: fixed tensors that `fn` must write before it reads them. They keep what the run
            before left there.
        real_rows: for each step, how many leading rows are real. The rows after them are
            filled with NaN where a buffer holds floats (so every input of floats has the same
            number of rows; a table of another kind is `state`); the real rows of the results
            must not change by a bit. What padding rows do to `state` is not compared: give it
            back as a result if they must not touch it.
        backend: "recorded" (any device) or "cuda".

    Returns:
        How many replays were compared.

    Raises:
        FaultFound: naming each fault.
        ValueError: fewer than two steps, steps that are all alike, a value that its buffer cannot
            hold or that has none, `real_rows` that do not fit, or `fn` returns no tensor.

    Examples:
        >>> x, total = torch.zeros(4), torch.zeros(4)
        >>> steps = [{"x": torch.ones(4)}, {"x": torch.zeros(4)}]
        >>> check_replay(lambda: x + 1, {"x": x}, steps)
        6
        >>> check_replay(lambda: total.add_(x), {"x": x}, steps, scratch={"total": total})
        Traceback (most recent call last):
        ...
        minilora.testing.faults.FaultFound: a buffer is not reset inside the graph: ...
    """
    check = _ReplayCheck(fn, inputs, state or {}, scratch or {}, backend)
    if not inputs:
        raise ValueError("check_replay got no inputs; name the buffers that a step writes")
    index = -1
    for index, values in enumerate(steps):
        if real_rows is not None:
            _check_real_rows(real_rows, index, inputs)
        check.step(index, values, None if real_rows is None else real_rows[index])
        if check.faults:
            raise FaultFound(check.faults)
    if index < 1:
        raise ValueError(f"check_replay got {index + 1} steps; a frozen value shows from two on")
    if not check.steps_differ:
        raise ValueError("check_replay: all steps are alike, so a frozen value cannot show")
    if real_rows is not None and len(real_rows) != index + 1:
        raise ValueError(f"check_replay: real_rows has {len(real_rows)} entries, one a step")
    return check.num_replays


def _check_real_rows(real_rows: Sequence[int], index: int, inputs: Tensors) -> None:
    """Refuse counts that would leave no padding where some is claimed, and so hide a leak."""
    if index >= len(real_rows):
        raise ValueError(f"check_replay: real_rows has {len(real_rows)} entries, one a step")
    rows = {len(x) for x in inputs.values() if x.dim() and x.is_floating_point()}
    if len(rows) > 1:
        raise ValueError(
            f"check_replay: with real_rows all inputs of floats have as many rows, not {rows}; "
            "give a tensor that is no list of rows as state"
        )
    most = min((len(buffer) for buffer in inputs.values() if buffer.dim()), default=0)
    if not 0 <= real_rows[index] <= most:
        raise ValueError(
            f"check_replay: real_rows[{index}]={real_rows[index]} must be from 0 to {most}, the "
            "rows of the inputs"
        )


class _ReplayCheck:
    def __init__(
        self, fn: Callable[[], Any], inputs: Tensors, state: Tensors, scratch: Tensors, name: str
    ) -> None:
        self._fn, self._inputs, self._fixed = fn, inputs, {**inputs, **state}
        self._scratch = scratch
        self._backend = make_backend(name, {**self._fixed, **scratch})
        self._captured: Captured | None = None
        self.faults: list[Fault] = []
        self.num_replays = 0
        self.steps_differ = False
        self._first: Tensors = {}

    def step(self, index: int, values: Tensors, real: int | None) -> None:
        self._where = f"step {index}"
        self._write(values)
        before = {name: tensor.clone() for name, tensor in self._fixed.items()}
        eager, after_eager = self._run(self._fn, before)
        if _has_nan(eager) and not _has_nan(list(before.values())):
            self._found(FaultKind.UNWRITTEN_MEMORY, "the function itself returns NaN")
            return
        if self._captured is None:
            self._capture(before)
        if self._captured is None:
            return
        first, after = self._run(self._replay, before)
        second, _ = self._run(self._replay, before)
        if not _same(first, second):
            self._found(FaultKind.NOT_RESET, "two replays of the same inputs differ")
        elif not _same(first, eager):
            self._backend.poison()
            third, _ = self._run(self._replay, before)
            fresh = _has_nan(first) or not _same(third, first)
            kind = FaultKind.UNWRITTEN_MEMORY if fresh else FaultKind.FROZEN_VALUE
            self._found(kind, "the replay is not what the function returns")
        elif not _same(list(after.values()), list(after_eager.values())):
            self._found(FaultKind.FROZEN_VALUE, "the replay leaves another state")
        else:
            self._poisoned(before, eager, real)

    def _write(self, values: Tensors) -> None:
        """Write a step's values to the inputs; refuse what would not be checked as it is meant."""
        if unknown := set(values) - set(self._inputs):
            raise ValueError(f"check_replay: {self._where} has {min(unknown)!r}, which is no input")
        for name, buffer in self._inputs.items():
            if name not in values:
                raise ValueError(f"check_replay: {self._where} has no value for input {name!r}")
            value = values[name]
            if value.shape != buffer.shape or not torch.can_cast(value.dtype, buffer.dtype):
                raise ValueError(
                    f"check_replay: {self._where} gives {name!r} the shape {list(value.shape)} of "
                    f"{value.dtype}, but the buffer has {list(buffer.shape)} of {buffer.dtype}"
                )
            buffer.copy_(value)
        if not self._first:
            self._first = {name: buffer.clone() for name, buffer in self._inputs.items()}
        self.steps_differ |= not all(
            same_bits(buffer, self._first[name]) for name, buffer in self._inputs.items()
        )

    def _capture(self, before: Tensors) -> None:
        try:
            self._captured = self._backend.capture(self._fn)
        except CaptureError as error:
            self._found(FaultKind.NOT_CAPTURABLE, str(error))
        self._restore(before)

    def _poisoned(self, before: Tensors, eager: list[torch.Tensor], real: int | None) -> None:
        self._backend.poison()
        for tensor in self._scratch.values():
            poison_(tensor)
        scratch, _ = self._run(self._replay, before)
        if not _same(scratch, eager):
            self._found(FaultKind.UNWRITTEN_MEMORY, "poison in the graph's scratch shows")
        elif real is not None:
            self._restore(before)
            for buffer in self._inputs.values():
                if buffer.is_floating_point() and buffer.dim():
                    poison_(buffer[real:])
            padded = [x.clone() for x in tree_leaves(self._replay()) if isinstance(x, torch.Tensor)]
            self._restore(before)
            pairs = [(a, b) for a, b in zip(padded, eager, strict=True) if a.dim()]  # rows
            if not all(same_bits(a[:real], b[:real]) for a, b in pairs):
                self._found(FaultKind.PADDING_LEAKS, f"NaN in the rows from {real} on shows")

    def _replay(self) -> Any:
        assert self._captured is not None
        self._backend.check_addresses()
        self.num_replays += 1
        return self._captured.replay()

    def _run(self, fn: Callable[[], Any], before: Tensors) -> tuple[list[torch.Tensor], Tensors]:
        self._restore(before)
        out = [leaf.clone() for leaf in tree_leaves(fn()) if isinstance(leaf, torch.Tensor)]
        if not out:
            raise ValueError("check_replay: the function returns no tensor that could be compared")
        after = {name: tensor.clone() for name, tensor in self._fixed.items()}
        for name in self._inputs:
            if not same_bits(after[name], before[name]):
                self._found(FaultKind.INPUT_WRITTEN, name)
        return out, after

    def _restore(self, before: Tensors) -> None:
        for name, tensor in self._fixed.items():
            tensor.copy_(before[name])

    def _found(self, kind: FaultKind, detail: str) -> None:
        if not any(fault.kind is kind for fault in self.faults):
            self.faults.append(Fault(kind, f"{detail} ({self._where})"))


def _has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    return any(bool(x.isnan().any()) for x in tensors if x.is_floating_point())


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
