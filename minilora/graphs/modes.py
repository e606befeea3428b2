"""How a recorder sees what torch does: one mode below autograd, one above everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from minilora.graphs.refusals import refuse_host_read


class Recorder(Protocol):
    """What the modes tell: a running capture."""

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call and write it down."""

    def assignment(self) -> AbstractContextManager[None]:
        """Let torch make a tensor of a Python number meanwhile."""


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Run what a launch runs: no mode sees it. Subclasses of tensors still mean what they do.

    (`torch._C.DisableTorchFunction` would take that from them too: a mask of
    `torch.nn.attention.bias`, say, would be read as the empty memory below it.)
    """
    with ExitStack() as popped:
        for _ in range(torch._C._len_torch_function_stack()):
            popped.enter_context(_pop_mode_temporarily())
        yield


class DispatchMode(TorchDispatchMode):
    """Hands every call that reaches the dispatcher to the capture."""

    def __init__(self, capture: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._capture.launch(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Refuses what reads a tensor on the host without a call to the dispatcher."""

    def __init__(self, capture: Recorder) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_host_read(func)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], (int, float, complex)):
            with self._capture.assignment():
                return func(*args)
        return func(*args, **(kwargs or {}))
