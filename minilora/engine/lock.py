"""`EngineLock`: one thread at a time, in order of arrival, and no Ctrl-C half-way."""

from __future__ import annotations

import signal
import threading
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
        self._handler: Any = None
        self._caught: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._turnstile:
                self._lock.acquire()
            self._owner = me
            self._defer_interrupts()
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
        caught, self._caught = self._caught, []
        handler, self._handler = self._handler, None
        self._owner = None
        self._lock.release()
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if caught and callable(handler):
            handler(*caught[0])

    def _defer_interrupts(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else it is ignored, or not Python's to handle
            self._handler = handler
            signal.signal(signal.SIGINT, lambda *seen: self._caught.append(seen))
