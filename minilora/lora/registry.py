"""`AdapterRegistry`: the adapters in host memory, by name and version.

Loading a name again makes a new version. Requests hold the version they came with, so a
running one finishes on its own weights while new requests get the new ones.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from minilora.config.errors import AdapterError, known_names, nearest
from minilora.lora.adapter import Adapter


@dataclass(eq=False)
class AdapterVersion:
    """One loaded version of a named adapter, and who uses it.

    Attributes:
        adapter: its weights, or None while they are dropped to keep to `max_cpu_loras`.
        path: of its folder, links resolved when it was loaded.
        digest: of the files it was read from; a later read must match.
        users: requests that hold it, waiting ones included.
        running: requests that need it in a slot now.
        preempted: requests that ran and will run again.
        retired: unloaded, or replaced by a newer version; no new request gets it.
        slot: its row in the stacked weights, or None.
    """

    name: str
    version: int
    path: str
    digest: str
    rank: int
    adapter: Adapter | None
    users: int = 0
    running: int = 0
    preempted: int = 0
    pinned: bool = False
    retired: bool = False
    slot: int | None = None
    last_used: int = field(default=0)

    @property
    def idle(self) -> bool:
        """Whether no request has begun on it and is not done, and it is not pinned."""
        return self.running == 0 and self.preempted == 0 and not self.pinned


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter that was read and is nobody's current version yet.

    Attributes:
        path: of its folder, links resolved.
        adapter: its weights.
    """

    path: str
    adapter: Adapter


class AdapterRegistry:
    """Names, versions and host memory; `AdapterSlots` adds the device.

    Args:
        read: reads and checks an adapter folder: ``read(name, path)``.
        max_cpu_loras: adapters whose weights are kept; None means no limit.
        on_drop: called with a version whose weights leave host memory.
        lock: guards the registry and the slots together.
    """

    def __init__(
        self,
        read: Callable[[str, str], Adapter],
        max_cpu_loras: int | None,
        on_drop: Callable[[AdapterVersion], None],
        lock: threading.RLock,
    ) -> None:
        self._read, self._limit, self._on_drop = read, max_cpu_loras, on_drop
        self._current: dict[str, AdapterVersion] = {}
        self._held: set[AdapterVersion] = set()  # versions whose weights are in host memory
        self._clock, self._versions = itertools.count(1), itertools.count(1)
        self._first_use = threading.Lock()  # two threads that use a new name load it once
        self._lock = lock

    def load(self, name: str, path: str) -> AdapterVersion:
        """Read `path` anew and make it the current version of `name`.

        The files are read outside the lock, so requests go on meanwhile.
        """
        return self._publish(name, self._read_folder(name, path), users=0)

    def prepare(self, name: str, path: str) -> ReadAdapter | None:
        """Do the reading of `hold` before it, so that whoever calls that is not kept waiting.

        A new name is loaded. Another folder of a known one is only read: nobody sees it until
        `hold` makes it current. Two threads that use a new name at once load it once.

        Returns:
            What `hold` will need; None where it has nothing to read.
        """
        if self._hold_if_current(name, path, 0):
            return None
        with self._first_use:
            if self._hold_if_current(name, path, 0):
                return None
            if name in self._current:
                return self._read_folder(name, path)
            self.load(name, path)
            return None

    def hold(
        self, name: str, path: str | None, users: int, read: ReadAdapter | None = None
    ) -> AdapterVersion:
        """Return the current version of `name`, held by `users` more requests.

        With a path that is not the current version's, what `prepare` read of it becomes current.
        Every user must be given back by `release`.

        Raises:
            AdapterError: an unknown name without a path, or what reading the folder found.
        """
        if path is None:
            with self._lock:
                return self.acquire(self.get(name), users)
        current = self._hold_if_current(name, path, users)
        if current is None:
            read = read or self.prepare(name, path)
            current = self._hold_if_current(name, path, users)
        return current or self._publish(name, read or self._read_folder(name, path), users)

    def _read_folder(self, name: str, path: str) -> ReadAdapter:
        resolved = os.path.realpath(path)  # a link may move, and the working folder change
        return ReadAdapter(resolved, self._read(name, path))

    def _publish(self, name: str, read: ReadAdapter, users: int) -> AdapterVersion:
        adapter = read.adapter
        with self._lock:
            version = AdapterVersion(
                name, next(self._versions), read.path, adapter.digest, adapter.max_rank, None, users
            )
            self.retire(name)
            self._current[name] = version
            self._keep(version, adapter)
            return version

    def _hold_if_current(self, name: str, path: str, users: int) -> AdapterVersion | None:
        with self._lock:
            current = self._current.get(name)
            if current is None or os.path.realpath(path) != current.path:
                return None
            return self.acquire(current, users)

    def get(self, name: str) -> AdapterVersion:
        """Return the current version of `name`; an unknown one lists the known names."""
        current = self._current.get(name)
        if current is None:
            raise AdapterError(self.unknown(name))
        return current

    def unknown(self, name: str) -> str:
        """Return the sentence that says that `name` is not loaded."""
        known = list(self._current)
        return (
            f"adapter {name!r} is not loaded{nearest(name, known)}; "
            f"loaded: {known_names(known)}; give its folder to load it"
        )

    def current(self) -> list[AdapterVersion]:
        """Return the current version of every name, sorted by name."""
        with self._lock:
            return [self._current[name] for name in sorted(self._current)]

    def retire(self, name: str) -> AdapterVersion | None:
        """Let no new request have the current version of `name`; free it when unused."""
        with self._lock:
            version = self._current.pop(name, None)
            if version is not None:
                version.retired, version.pinned = True, False
                self.free_if_done(version)
            return version

    def acquire(self, version: AdapterVersion, users: int = 1) -> AdapterVersion:
        """Count more requests that hold `version`; return it."""
        with self._lock:
            version.users += users
            return version

    def release(self, version: AdapterVersion, users: int = 1) -> None:
        """Count requests less; a retired version is freed with its last user."""
        with self._lock:
            version.users -= users
            self.free_if_done(version)

    def free_if_done(self, version: AdapterVersion) -> None:
        """Drop a retired version that nobody uses any more."""
        if version.retired and version.users == 0:
            self._drop(version)

    def touch(self, version: AdapterVersion) -> None:
        """Mark `version` as the most recently used."""
        version.last_used = next(self._clock)

    def weights(self, version: AdapterVersion) -> Adapter:
        """Return the weights of `version`, reading them again if they were dropped.

        Raises:
            AdapterError: the files are gone or are not those that were loaded.
        """
        with self._lock:
            if version.adapter is None:
                adapter = self._read(version.name, version.path)
                if adapter.digest != version.digest:
                    raise AdapterError(
                        f"adapter {version.name!r}: the files in {version.path} changed after it "
                        "was loaded and its weights were dropped (max_cpu_loras); "
                        "load it again to use the new ones"
                    )
                if not self._keep(version, adapter):
                    return adapter
            assert version.adapter is not None
            return version.adapter

    def _keep(self, version: AdapterVersion, adapter: Adapter) -> bool:
        """Hold the weights, dropping the least recently used idle ones over the limit.

        Those that no waiting request wants go first. A retired version with users stays: its
        files may be others by now. Where no other can go, the new weights are not held, but read
        again when they are needed.
        """
        self.touch(version)
        droppable = [held for held in self._held if held.idle and not held.retired]
        droppable.sort(key=lambda held: (held.users > 0, held.last_used))
        while self._limit is not None and len(self._held) >= self._limit:
            if not droppable:
                return False
            self._drop(droppable.pop(0))
        version.adapter = adapter
        self._held.add(version)
        return True

    def _drop(self, version: AdapterVersion) -> None:
        self._held.discard(version)
        version.adapter = None
        self._on_drop(version)
