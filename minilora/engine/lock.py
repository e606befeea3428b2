"""`EngineLock`: one thread at a time, in order of arrival, and no signal half-way."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its slow enumerations
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

# Those that programs handle; some systems lack some.
_NAMES = ("INT", "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2", "VTALRM", "PROF")
_SIGNALS = [int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")]


class EngineLock:
    """Guards the engine's state, as a context manager; a thread that has it may enter again.

    A plain lock goes back at once to a thread that steps in a loop, and others wait for ever.
    Here whoever wants it first passes a turnstile, so the looping thread queues up as well.

    In the main thread, a Ctrl-C inside is delivered at the end, and so are other signals with a
    handler in Python, such as a timeout's: otherwise it could fall between two lines that belong
    together, leave a block or a slot to nobody, or want the lock that its own thread is taking.
    """

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._deferred: _DeferredSignals | None = None  # the main thread's

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            deferred = _DeferredSignals.start()  # first: what is acquired must have an owner
            with self._turnstile:
                self._lock.acquire()
            self._owner, self._deferred = me, deferred
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        deferred, self._deferred, self._owner = self._deferred, None, None
        self._lock.release()
        if deferred is not None:  # last: a signal before this line is caught, not lost
            deferred.deliver()


class _DeferredSignals:
    """Catches signals in the main thread until `deliver`, which hands them on."""

    def __init__(self, handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
        self._handlers = handlers
        self._caught: dict[int, FrameType | None] = {}

    @classmethod
    def start(cls) -> _DeferredSignals | None:
        """Return None where there is nothing to defer."""
        if threading.current_thread() is not threading.main_thread():
            return None
        found = ((number, _signal.getsignal(number)) for number in _SIGNALS)
        # Others are ignored, or not Python's to handle.
        handlers = {number: handler for number, handler in found if callable(handler)}
        if not handlers:
            return None
        deferred = cls(handlers)
        for number in handlers:
            _signal.signal(number, deferred._caught.setdefault)
        return deferred

    def deliver(self) -> None:
        """Give the signals back to their handlers, then hand on what came meanwhile."""
        with ExitStack() as last:  # each is done, whatever another raises
            last.callback(self._hand_on)
            for number, handler in self._handlers.items():
                last.callback(_signal.signal, number, handler)

    def _hand_on(self) -> None:
        with ExitStack() as each:
            for number, frame in reversed(self._caught.items()):
                each.callback(self._handlers[number], number, frame)
