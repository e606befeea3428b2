"""`EngineLock`: one thread at a time, in order of arrival, and no Ctrl-C half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class EngineLock:
    """Guards the engine's state, as a context manager; a thread that has it may enter again.

    A plain lock goes back at once to a thread that steps in a loop, and others wait for ever.
    Here whoever wants it first passes a turnstile, so the looping thread queues up as well.

    In the main thread, a Ctrl-C inside is delivered at the end: otherwise it could fall between
    two lines that belong together, and leave a block or a slot to nobody.
    """

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._deferred: _DeferredInterrupt | None = None  # the main thread's

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            deferred = _DeferredInterrupt.start()  # first: what is acquired must have an owner
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
        if deferred is not None:  # last: an interrupt before this line is caught, not lost
            deferred.deliver()


class _DeferredInterrupt:
    """Catches Ctrl-C in the main thread until `deliver`, which hands it on."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._caught: list[tuple[int, FrameType | None]] = []

    @classmethod
    def start(cls) -> _DeferredInterrupt | None:
        """Return None where there is nothing to defer."""
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # it is ignored, or not Python's to handle
            return None
        deferred = cls(handler)
        signal.signal(signal.SIGINT, lambda *seen: deferred._caught.append(seen))
        return deferred

    def deliver(self) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._caught:
            self._handler(*self._caught[0])
