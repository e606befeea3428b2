"""`AdapterSlots`: which adapter is in which row of the stacked weights.

A slot that a running request uses is never evicted; otherwise the least recently used one
makes room. Identity is (name, version), see `AdapterVersion`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minilora.config.errors import AdapterError
from minilora.lora.adapter import Adapter
from minilora.lora.layers import LoraLayer
from minilora.lora.registry import AdapterRegistry, AdapterVersion


@dataclass(frozen=True)
class AdapterInfo:
    """What `LLM.list_adapters` tells of one adapter.

    Attributes:
        rank: the largest rank of its modules.
        lora_slot: where it is on the device, or None.
        num_users: requests that hold it, running or waiting.
        pinned: whether it stays in its slot.
        version: counts loads over all names; a reload has a higher one.
    """

    name: str
    version: int
    path: str
    rank: int
    lora_slot: int | None
    num_users: int
    pinned: bool


class AdapterSlots:
    """Adapters in host memory and in the `max_loras` slots of the device.

    Args:
        layers: every layer with slots; a slot is written in all of them.
        max_loras: slots.
        max_cpu_loras: adapters kept in host memory; None means no limit.
        read: reads and checks an adapter folder: ``read(name, path)``.
    """

    def __init__(
        self,
        layers: Iterable[LoraLayer],
        *,
        max_loras: int,
        max_cpu_loras: int | None,
        read: Callable[[str, str], Adapter],
    ) -> None:
        self.layers = list(layers)
        self._lock = threading.RLock()
        self.registry = AdapterRegistry(read, max_cpu_loras, self._evict, self._lock)
        self._slots: list[AdapterVersion | None] = [None] * max_loras
        self.num_swaps = 0  # times that a slot was written

    @property
    def max_loras(self) -> int:
        """Slots on the device."""
        return len(self._slots)

    @property
    def resident(self) -> list[AdapterVersion]:
        """The adapters that are in a slot."""
        return [version for version in self._slots if version is not None]

    def has_room_for(self, version: AdapterVersion) -> bool:
        """Whether `start` would find a slot; nothing is read or written."""
        with self._lock:
            return version.slot is not None or self._free_slot() is not None

    def start(self, version: AdapterVersion, resumed: bool = False) -> int | None:
        """Give a request's adapter a slot for as long as the request runs.

        Args:
            version: the request's.
            resumed: the request was suspended before.

        Returns:
            The slot, or None when every slot is in use or pinned; the request then waits.

        Raises:
            AdapterError: its weights were dropped and cannot be read again.
        """
        with self._lock:
            slot = self._place(version)
            if slot is not None:
                version.running += 1
                version.preempted -= resumed
            return slot

    def stop(self, version: AdapterVersion) -> None:
        """Count one running request less."""
        with self._lock:
            version.running -= 1
            self.registry.touch(version)

    def suspend(self, version: AdapterVersion) -> None:
        """Count a running request as preempted: its slot may go, its weights stay at hand."""
        with self._lock:
            self.stop(version)
            version.preempted += 1

    def forget_suspended(self, version: AdapterVersion) -> None:
        """Count one preempted request less that will not run again."""
        with self._lock:
            version.preempted -= 1

    def pin(self, name: str) -> None:
        """Put an adapter in a slot and keep it there.

        Raises:
            AdapterError: an unknown name, no slot is free now, or no slot would be left for
                other adapters.
        """
        with self._lock:
            version = self.registry.get(name)
            pinned = sum(other.pinned for other in self.resident if other is not version)
            if pinned + 1 >= self.max_loras:
                raise AdapterError(
                    f"pinning adapter {name!r} would leave no slot for others "
                    f"(max_loras={self.max_loras}, pinned: {pinned}); raise max_loras"
                )
            if self._place(version) is None:
                raise AdapterError(
                    f"adapter {name!r} cannot be pinned now: all {self.max_loras} slots are in "
                    "use by running requests; try again when one has finished"
                )
            version.pinned = True

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        self.registry.get(name).pinned = False

    def list_adapters(self) -> list[AdapterInfo]:
        """Return the current adapters, sorted by name."""
        return [self.describe(version) for version in self.registry.current()]

    def describe(self, version: AdapterVersion) -> AdapterInfo:
        """Return what a user may know of a version."""
        v = version
        return AdapterInfo(v.name, v.version, v.path, v.rank, v.slot, v.users, v.pinned)

    def soonest_free(self) -> AdapterVersion | None:
        """Return the resident, unpinned adapter with the fewest running requests."""
        candidates = [version for version in self.resident if not version.pinned]
        return min(candidates, key=lambda v: (v.running, v.last_used), default=None)

    def _place(self, version: AdapterVersion) -> int | None:
        """Return the adapter's slot, writing it to a free or evicted one if it has none."""
        self.registry.touch(version)
        if version.slot is not None:
            return version.slot
        slot = self._free_slot()
        if slot is None:
            return None
        weights = self.registry.weights(version)  # may evict, but never the slot just chosen
        occupant = self._slots[slot]
        if occupant is not None:
            self._evict(occupant)
        for layer in self.layers:
            layer.write_slot(slot, weights.modules)
        self._slots[slot], version.slot = version, slot
        self.num_swaps += 1
        return slot

    def _free_slot(self) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        idle = [v for v in self.resident if v.running == 0 and not v.pinned]
        return min(idle, key=lambda version: version.last_used).slot if idle else None

    def _evict(self, version: AdapterVersion) -> None:
        """Forget where a version was. Its weights stay in the slot until the next is written."""
        if version.slot is not None:
            self._slots[version.slot], version.slot = None, None
