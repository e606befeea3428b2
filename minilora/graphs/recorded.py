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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minilora.graphs.arena import Arena, Lifetime
from minilora.graphs.base import CaptureError, GraphBackend, Static
from minilora.graphs.refusals import refuse_host_read, refuse_launch, where
from minilora.ops.scratch import filled, poison_

_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass(frozen=True)
class _Launch:
    """One call of the tape.

    Attributes:
        fresh: the tensors it made, by their place among the leaves of its result.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]

    @property
    def name(self) -> str:
        name: str = self.func._schema.name
        return name

    def run(self) -> None:
        """Make the call again; what it makes goes to the old addresses."""
        if self.name in _ALLOCATIONS:
            for _, tensor in self.fresh:
                poison_(tensor)
            return
        result = tree_leaves(self.func(*self.args, **self.kwargs))
        for place, tensor in self.fresh:
            tensor.copy_(result[place])


class RecordedGraph:
    """A tape: the launches of a function, or of one piece of it."""

    def __init__(self, capture: _RecordedCapture, launches: Sequence[_Launch], first: bool) -> None:
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
        with torch._C.DisableTorchFunction(), filled(), torch.autocast(device, enabled=False):
            for launch in self._launches:
                launch.run()

    def nodes(self) -> list[str]:
        """Return the names of the launches in order, such as "aten::mm"; taking memory is none."""
        return [launch.name for launch in self._launches if launch.name not in _ALLOCATIONS]


class RecordedBackend(GraphBackend):
    """Records graphs on any device; see `GraphBackend`."""

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
        self._launches: list[_Launch] = []
        self._held: Counter[int] = Counter()  # references of the tape to each tensor, by id
        self._count = self._pieces = 0

    # ---- the protocol

    def begin(self) -> None:
        self._launches = []
        self._modes = [_FunctionMode(), _DispatchMode(self.launch)]
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> RecordedGraph:
        self._leave_modes()
        self._pieces += 1
        return RecordedGraph(self, self._launches, first=self._pieces == 1)

    def finish(self) -> int:
        for key, life in self._made.items():
            self._close(key, life)
        self.backend.ended()
        self._arena.place(self._made.values())
        self._made, self._static = {}, {}
        return 0

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
        life.size = max(1, life.tensors[0].untyped_storage().nbytes())  # out= may have resized it
        for index in range(len(life.tensors)):
            tensor = life.tensors[index]
            if _storage(tensor) != key:
                raise CaptureError(
                    f"a tensor {list(tensor.shape)} was made to show other memory during the "
                    "capture (through .data, say); a graph cannot follow that"
                )
            # Two references more than the tape's own: `tensor` and the argument of getrefcount.
            if sys.getrefcount(tensor) > self._held[id(tensor)] + 2:
                life.last = math.inf

    # ---- one launch

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call and write it on the tape."""
        refuse_launch(func, args, kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for tensor in inputs:
            self._touch(func, tensor)
        with torch._C.DisableTorchFunction(), filled():
            result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        fresh = tuple(
            (place, leaf)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not self._known(leaf)
        )
        for _, tensor in fresh:
            self._made[_storage(tensor)] = Lifetime(0, self._count, self._count)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if fresh or func._schema.is_mutable or not tensors:  # all else is a view: no launch
            self._held.update(id(tensor) for tensor in inputs)
            self._held.update(id(tensor) for _, tensor in fresh)
            entry = _Launch(func, args, kwargs, fresh)
            if entry.name in _ALLOCATIONS:
                entry.run()  # fills it
            self._launches.append(entry)
            self._count += 1
        return result

    def _known(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._made or _storage(tensor) in self._static

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


class _DispatchMode(TorchDispatchMode):
    """Hands every call that reaches the dispatcher to the capture."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launch = launch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._launch(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Refuses what reads a tensor on the host without a call to the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_host_read(func)
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's memory; its views have the same."""
    return int(tensor.untyped_storage()._cdata)
