"""Graphs without a GPU: a recorder that freezes what a CUDA graph would freeze, and is stricter.

A CUDA graph is a list of launches with their addresses and their Python values. So is this tape:
it holds every ATen and custom-op call with its tensors and numbers, and `replay` makes the calls
again. What stays silent on CUDA is refused here with its line: a read of a tensor that nobody
declared fixed, a number taken from a tensor, a constant copied from the host. Memory that was
not written holds NaN.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from minilora.graphs.arena import Arena, Lifetime
from minilora.graphs.base import CaptureError, GraphBackend, Static
from minilora.graphs.modes import DispatchMode, FunctionMode, without_function_modes
from minilora.graphs.refusals import refuse_launch, where
from minilora.graphs.tape import ALLOCATIONS, Launch
from minilora.ops.scratch import filled


class RecordedGraph:
    """A tape: the launches of a function, or of one piece of it."""

    def __init__(self, capture: _RecordedCapture, launches: Sequence[Launch], first: bool) -> None:
        self._capture, self._launches, self._first = capture, launches, first

    @torch.no_grad()
    def replay(self) -> None:
        """Make all calls again, on what the fixed tensors hold now.

        Raises:
            CaptureError: a fixed tensor has moved.
        """
        if self._first:  # of the pieces of one capture; the later ones read what it leaves
            self._capture.backend.check_addresses()
            self._capture.backend.poison()
        device = self._capture.device
        with without_function_modes(), filled(), torch.autocast(device, enabled=False):
            for launch in self._launches:
                launch.run()

    def nodes(self) -> list[str]:
        """Return the names of the launches in order, such as "aten::mm"; taking memory is none."""
        return [launch.name for launch in self._launches if launch.name not in ALLOCATIONS]


class RecordedBackend(GraphBackend):
    """Records graphs on any device; see `GraphBackend`.

    Examples:
        >>> x = torch.zeros(2)
        >>> graphs = RecordedBackend({"x": x})
        >>> double = graphs.capture(lambda: x * 2)
        >>> double.nodes()
        ['aten::mul']
        >>> _ = x.fill_(3.0)
        >>> double.replay()
        tensor([6., 6.])
    """

    name = "recorded"

    def __init__(self, static: Static) -> None:
        super().__init__(static)
        self._arena = Arena()
        self._capture: _RecordedCapture | None = None

    def start(self) -> _RecordedCapture:
        """Return a new capture.

        Raises:
            CaptureError: there is one already.
        """
        if self._capture is not None:
            raise CaptureError("a capture is running already; finish it before the next one")
        self.note_addresses()
        self._capture = _RecordedCapture(self, self._arena)
        return self._capture

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, whose memory then lives to the end of the graph."""
        if self._capture is not None:
            self._capture.keep(tensor)
        return tensor

    def ended(self) -> None:
        """Note that the running capture is over."""
        self._capture = None

    @property
    def pool_memory(self) -> int:
        """Bytes of the memory that all graphs share."""
        return self._arena.size

    def poison(self) -> None:
        """Fill the shared memory with NaN."""
        self._arena.poison()


class _RecordedCapture:
    """One capture: the tape so far, and what is known of each storage."""

    def __init__(self, backend: RecordedBackend, arena: Arena) -> None:
        self.backend, self._arena = backend, arena
        self._static = {_storage(t): t for t in backend.static().values() if t.numel()}
        self.device = next((t.device.type for t in self._static.values()), "cpu")
        self._made: dict[int, Lifetime] = {}
        self._modes: list[Any] = []
        self._launches: list[Launch] = []
        self._held: Counter[int] = Counter()  # references of the tape to each tensor, by id
        self._constants: dict[int, torch.Tensor] = {}  # Python numbers that torch made tensors of
        self._assigning = False
        self._count = self._pieces = 0

    # ---- the protocol

    def begin(self) -> None:
        if torch.is_inference_mode_enabled():
            raise CaptureError(
                "a capture under torch.inference_mode makes tensors that no replay may write; use "
                "torch.no_grad"
            )
        self._launches = []
        self._modes = [FunctionMode(self), DispatchMode(self)]
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> RecordedGraph:
        self._leave_modes()
        self._pieces += 1
        return RecordedGraph(self, self._launches, first=self._pieces == 1)

    def finish(self) -> int:
        for key, life in self._made.items():
            self._close(key, life)
        fixed = [life for life in self._made.values() if life.shown_elsewhere()]
        self._arena.place(life for life in self._made.values() if life not in fixed)
        self.backend.ended()
        self._made, self._static, self._constants = {}, {}, {}
        return sum(life.size for life in fixed)

    def abandon(self) -> None:
        self._leave_modes()
        self.backend.ended()

    def _leave_modes(self) -> None:
        while self._modes:
            self._modes.pop().__exit__(None, None, None)

    def keep(self, tensor: torch.Tensor) -> None:
        """Let a tensor's memory live to the end of the capture."""
        self._note(tensor)
        if (life := self._made.get(_storage(tensor))) is not None:
            life.last = math.inf

    def _close(self, key: int, life: Lifetime) -> None:
        """Fix a lifetime at the end: what somebody still holds lives on, as on CUDA."""
        bases = {id(tensor._base) for tensor in life.tensors}
        for index in range(len(life.tensors)):
            tensor_id = id(life.tensors[index])
            if _storage(life.tensors[index]) != key:
                raise CaptureError(
                    f"a tensor {list(life.tensors[index].shape)} was made to show other memory "
                    "during the capture (through .data, say); a graph cannot follow that"
                )
            ours = self._held[tensor_id] + (_references_of_views() if tensor_id in bases else 0)
            # One more is the argument of getrefcount; a local name here might or might not be.
            if sys.getrefcount(life.tensors[index]) > ours + 1:
                life.last = math.inf

    # ---- one launch

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call and write it on the tape."""
        refuse_launch(func, args, kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self._assigning and func._schema.name == "aten::lift_fresh" and args[0].dim() == 0:
            self._constants[_storage(args[0])] = args[0]
        for tensor in inputs:
            self._touch(func, tensor)
        with without_function_modes(), filled():
            result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        fresh = tuple(
            (place, leaf)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and self._is_fresh(func, leaf, inputs)
        )
        for _, tensor in fresh:
            self._made[_storage(tensor)] = Lifetime(
                tensor.untyped_storage(), self._count, self._count
            )
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if fresh or func._schema.is_mutable or not tensors:  # all else is a view: no launch
            self._held.update(id(tensor) for tensor in inputs)
            self._held.update(id(tensor) for _, tensor in fresh)
            entry = Launch(func, args, kwargs, fresh)
            if entry.name in ALLOCATIONS:
                entry.run()  # fills it
            self._launches.append(entry)
            self._count += 1
        return result

    def _known(self, tensor: torch.Tensor) -> bool:
        key = _storage(tensor)
        return key in self._made or key in self._static or key in self._constants

    def _is_fresh(self, func: Any, result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a launch made a tensor's memory: if not, it got it as an argument."""
        if not self._known(result) and not self._arena.holds(result):
            return True
        if result.numel() and not any(_storage(result) == _storage(x) for x in inputs):
            raise CaptureError(
                f"{where()}: {func._schema.name} returns memory that it keeps from call to call; "
                "a graph needs a new tensor, or one that the op is given to write"
            )
        return False

    @contextmanager
    def assignment(self) -> Iterator[None]:
        """Let torch make a tensor of a Python number, as it does on a CPU in ``y[0] = 1.0``.

        On CUDA the number travels with the launch; so it does here, frozen.
        """
        self._assigning = True
        try:
            yield
        finally:
            self._assigning = False

    def _touch(self, func: Any, tensor: torch.Tensor) -> None:
        """Note that a launch reads or writes a tensor; refuse one that nobody declared."""
        if not self._known(tensor) and tensor.numel():
            shape = list(tensor.shape)
            raise CaptureError(
                f"{where()}: {func._schema.name} uses a tensor {shape} of {tensor.dtype} that is "
                "not declared static; a graph would read its old address for ever"
            )
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        life = self._made.get(_storage(tensor))
        if life is not None:
            life.last = max(life.last, self._count)
            if not any(tensor is known for known in life.tensors):
                life.tensors.append(tensor)
                self._held[id(tensor)] += 1


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's memory; its views have the same."""
    return int(tensor.untyped_storage()._cdata)


def _references_of_views() -> int:
    """Return what views add to the Python references of their base: 1 in torch 2.13.

    Measured, since it is an inner matter of torch.
    """
    base = torch.empty(1)
    before = sys.getrefcount(base)
    view = base.view(1)
    return sys.getrefcount(base) - before if view._base is base else 0
