"""AdapterSlots and AdapterRegistry against a model that is one number a slot."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minilora.config.errors import AdapterError
from minilora.lora.registry import AdapterVersion
from minilora.lora.slots import AdapterSlots


@dataclass
class FakeAdapter:
    """Its only module is a number: the content of its folder when it was read."""

    modules: Mapping[str, Any]
    digest: str
    max_rank: int = 1


@dataclass
class Disk:
    """Folders with a number each; counts reads."""

    content: dict[str, int] = field(default_factory=dict)
    reads: int = 0

    def read(self, name: str, path: str) -> Any:
        self.reads += 1
        key = path if path in self.content else os.path.basename(path)
        if key not in self.content:
            raise AdapterError(f"adapter {name!r}: {path} is missing")
        return FakeAdapter({"it": self.content[key]}, str(self.content[key]))


class FakeLayer:
    """What a slot holds."""

    def __init__(self, slots: int) -> None:
        self.slots: list[int | None] = [None] * slots

    def write_slot(self, slot: int, modules: Mapping[str, Any]) -> None:
        self.slots[slot] = modules["it"]


def make(
    max_loras: int = 2, max_cpu_loras: int | None = None, folders: int = 8
) -> tuple[AdapterSlots, FakeLayer, Disk]:
    disk = Disk({f"dir{i}": i for i in range(folders)})
    layer = FakeLayer(max_loras)
    layers: Any = [layer]
    slots = AdapterSlots(layers, max_loras=max_loras, max_cpu_loras=max_cpu_loras, read=disk.read)
    return slots, layer, disk


def use(slots: AdapterSlots, layer: FakeLayer, version: AdapterVersion) -> int | None:
    """Start, look at what the slot holds, stop."""
    slots.registry.acquire(version)
    slot = slots.start(version)
    assert slot is not None
    content = layer.slots[slot]
    slots.stop(version)
    slots.registry.release(version)
    return content


def test_first_use_loads_and_same_path_opens_nothing() -> None:
    slots, layer, disk = make()
    first = slots.registry.hold("a", "dir1", 0)
    assert use(slots, layer, first) == 1
    assert slots.registry.hold("a", "dir1", 0) is first
    assert slots.registry.hold("a", None, 0) is first
    assert slots.registry.hold("a", "./dir1", 0) is first
    assert disk.reads == 1
    second = slots.registry.hold("a", "dir2", 0)
    assert second is not first
    assert use(slots, layer, second) == 2
    assert disk.reads == 2


def test_load_reads_anew_and_running_requests_keep_their_version() -> None:
    slots, layer, disk = make()
    old = slots.registry.load("a", "dir1")
    slots.registry.acquire(old)
    old_slot = slots.start(old)
    disk.content["dir1"] = 77
    new = slots.registry.load("a", "dir1")
    assert old_slot is not None
    assert layer.slots[old_slot] == 1
    assert use(slots, layer, new) == 77
    assert layer.slots[old_slot] == 1, "the old version runs on"
    slots.stop(old)
    slots.registry.release(old)
    assert old.slot is None, "the old version went with its last user"
    assert slots.resident == [new]


def test_least_recently_used_idle_slot_is_evicted() -> None:
    slots, layer, _ = make(max_loras=2)
    a, b, c = (slots.registry.load(name, f"dir{i}") for i, name in enumerate("abc"))
    use(slots, layer, a)
    use(slots, layer, b)
    use(slots, layer, a)
    use(slots, layer, c)
    assert b.slot is None
    assert {a.slot, c.slot} == {0, 1}


def test_a_slot_in_use_is_never_evicted() -> None:
    slots, layer, _ = make(max_loras=1)
    a, b = slots.registry.load("a", "dir1"), slots.registry.load("b", "dir2")
    slots.registry.acquire(a)
    assert slots.start(a) == 0
    assert slots.start(b) is None
    assert layer.slots == [1]
    slots.stop(a)
    assert slots.start(b) == 0


def test_unload_frees_the_slot_over_many_cycles() -> None:
    """Field report S7: the slot table and the eviction list were not cleaned."""
    slots, layer, _ = make(max_loras=2)
    for cycle in range(50):
        version = slots.registry.load(f"name{cycle}", f"dir{cycle % 8}")
        assert use(slots, layer, version) == cycle % 8
        slots.registry.retire(f"name{cycle}")
        assert slots.resident == []
        assert slots.list_adapters() == []
        assert not slots.registry._held


def test_unload_waits_for_users() -> None:
    slots, _layer, _ = make()
    version = slots.registry.load("a", "dir1")
    slots.registry.acquire(version)  # a waiting request
    slots.registry.retire("a")
    with pytest.raises(AdapterError, match="'a' is not loaded"):
        slots.registry.get("a")
    assert slots.start(version) is not None, "it is still served"
    slots.stop(version)
    slots.registry.release(version)
    assert version.adapter is None


def test_unknown_name_lists_the_known_ones() -> None:
    slots, _, _ = make()
    slots.registry.load("pirate", "dir1")
    slots.registry.load("sql", "dir2")
    with pytest.raises(AdapterError, match=r"'pirat'.*did you mean 'pirate'.*'pirate', 'sql'"):
        slots.registry.hold("pirat", None, 1)


def test_cpu_limit_drops_the_least_recently_used_and_reads_it_again() -> None:
    slots, layer, disk = make(max_loras=1, max_cpu_loras=2)
    a, b, c = (slots.registry.load(name, f"dir{i}") for i, name in enumerate("abc"))
    assert a.adapter is None, "the third load dropped the first"
    assert b.adapter is not None
    reads = disk.reads
    assert use(slots, layer, b) == 1
    assert disk.reads == reads, "swapping in from host memory opens no file"
    assert use(slots, layer, a) == 0
    assert disk.reads == reads + 1
    assert use(slots, layer, c) == 2


def test_six_adapters_rotate_through_one_slot_and_a_host_cache_of_six() -> None:
    """Field report U4: registering one adapter filled the cache for ever."""
    slots, layer, disk = make(max_loras=1, max_cpu_loras=6)
    versions = [slots.registry.load(f"n{i}", f"dir{i}") for i in range(6)]
    for _ in range(3):
        assert [use(slots, layer, version) for version in versions] == list(range(6))
    assert disk.reads == 6


def test_a_running_adapter_is_not_dropped_from_host_memory() -> None:
    slots, layer, _ = make(max_loras=1, max_cpu_loras=1)
    a = slots.registry.load("a", "dir1")
    slots.registry.acquire(a)
    slots.start(a)
    b = slots.registry.load("b", "dir2")  # no room in host memory: known, but not held
    assert a.adapter is not None
    assert b.adapter is None
    assert layer.slots == [1]
    slots.stop(a)
    slots.registry.release(a)
    assert use(slots, layer, b) == 2


def test_files_that_changed_after_a_drop_are_an_error_not_other_weights() -> None:
    slots, layer, disk = make(max_loras=1, max_cpu_loras=1)
    a = slots.registry.load("a", "dir1")
    slots.registry.load("b", "dir2")
    disk.content["dir1"] = 99
    with pytest.raises(AdapterError, match=r"'a': the files in .*dir1 changed.*load it again"):
        slots.start(a)
    assert a.running == 0
    assert use(slots, layer, slots.registry.load("a", "dir1")) == 99


def test_files_that_are_gone_fail_that_request_only() -> None:
    slots, layer, disk = make(max_loras=1, max_cpu_loras=1)
    a, b = slots.registry.load("a", "dir1"), slots.registry.load("b", "dir2")
    del disk.content["dir1"]
    with pytest.raises(AdapterError, match="dir1 is missing"):
        slots.start(a)
    assert use(slots, layer, b) == 2


def test_pin_keeps_the_slot_and_leaves_one_for_others() -> None:
    slots, layer, _ = make(max_loras=2)
    for i, name in enumerate("abc"):
        slots.registry.load(name, f"dir{i}")
    slots.pin("a")
    for name in "bcbc":
        use(slots, layer, slots.registry.get(name))
    assert slots.registry.get("a").slot is not None
    with pytest.raises(AdapterError, match=r"leave no slot for others.*max_loras=2"):
        slots.pin("b")
    slots.unpin("a")
    slots.pin("b")
    slots.registry.retire("b")
    assert [v.name for v in slots.resident] in (["a"], ["c"])


def test_pin_when_all_slots_run_says_so() -> None:
    slots, _, _ = make(max_loras=2)
    for i, name in enumerate("abc"):
        slots.registry.load(name, f"dir{i}")
    slots.start(slots.registry.get("a"))
    slots.start(slots.registry.get("b"))
    with pytest.raises(AdapterError, match="'c' cannot be pinned now: all 2 slots"):
        slots.pin("c")


def test_two_threads_that_use_a_new_name_load_it_once() -> None:
    """Field report S8 (Dynamo #5184)."""
    slots, _, disk = make()
    plain = disk.read

    def slow(name: str, path: str) -> Any:
        time.sleep(0.05)
        return plain(name, path)

    slots.registry._read = slow
    found: list[AdapterVersion] = []
    threads = [
        threading.Thread(target=lambda: found.append(slots.registry.hold("a", "dir1", 1)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disk.reads == 1
    assert len(set(map(id, found))) == 1
    assert found[0].users == 8


def test_a_reload_does_not_take_the_weights_of_a_version_in_use() -> None:
    """With a full host memory, too: its files may be others by now."""
    slots, layer, disk = make(max_loras=1, max_cpu_loras=1)
    old = slots.registry.hold("a", "dir1", 1)
    disk.content["dir1"] = 99
    new = slots.registry.load("a", "dir1")
    assert use(slots, layer, old) == 1
    slots.registry.release(old)
    assert use(slots, layer, new) == 99


def test_a_preempted_request_keeps_its_weights_at_hand() -> None:
    slots, layer, disk = make(max_loras=1, max_cpu_loras=1)
    a = slots.registry.hold("a", "dir1", 1)
    slots.start(a)
    slots.suspend(a)
    disk.content["dir1"] = 99
    slots.registry.load("b", "dir2")
    slot = slots.start(a, resumed=True)
    assert slot is not None
    assert layer.slots[slot] == 1
    assert (a.running, a.preempted) == (1, 0)


def test_a_link_that_moves_is_another_path(tmp_path: Path) -> None:
    slots, layer, disk = make()
    for i in (1, 2):
        (tmp_path / f"dir{i}").mkdir()
        disk.content[str(tmp_path / f"dir{i}")] = i
    link = tmp_path / "link"
    read = disk.read
    slots.registry._read = lambda name, path: read(name, os.path.realpath(path))
    for i in (1, 2):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / f"dir{i}")
        assert use(slots, layer, slots.registry.hold("a", str(link), 0)) == i
    assert use(slots, layer, slots.registry.hold("a", str(tmp_path / "dir2"), 0)) == 2
    assert disk.reads == 2


class SlotsMachine(RuleBasedStateMachine):
    """Random loads, reloads, unloads, starts, stops and pins; every slot must hold its own."""

    @initialize(max_loras=st.integers(1, 3), extra=st.none() | st.integers(0, 2))
    def begin(self, max_loras: int, extra: int | None) -> None:
        self.limit = None if extra is None else max_loras + extra
        self.slots, self.layer, self.disk = make(max_loras, self.limit)
        self.want: dict[AdapterVersion, int] = {}
        self.users: list[AdapterVersion] = []
        self.running: list[AdapterVersion] = []
        self.suspended: list[AdapterVersion] = []

    @rule(name=st.sampled_from("abcd"), path=st.integers(0, 7))
    def load(self, name: str, path: int) -> None:
        version = self.slots.registry.load(name, f"dir{path}")
        self.want[version] = path

    @rule(name=st.sampled_from("abcd"))
    def arrive(self, name: str) -> None:
        current = {info.name for info in self.slots.list_adapters()}
        if name in current:
            self.users.append(self.slots.registry.hold(name, None, 1))

    @precondition(lambda self: self.users)
    @rule(pick=st.randoms(use_true_random=False))
    def start(self, pick: random.Random) -> None:
        version = pick.choice(self.users)
        busy = set(self.running) | {v for v in self.slots.resident if v.pinned}
        slot = self.slots.start(version)
        if slot is None:
            assert len(busy) == self.slots.max_loras, "a slot was free"
            assert version not in busy
        else:
            self.users.remove(version)
            self.running.append(version)

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False), preempt=st.booleans())
    def stop(self, pick: random.Random, preempt: bool) -> None:
        version = pick.choice(self.running)
        self.running.remove(version)
        if preempt:
            self.slots.suspend(version)
            self.suspended.append(version)
        else:
            self.slots.stop(version)
            self.slots.registry.release(version)

    @precondition(lambda self: self.suspended)
    @rule(pick=st.randoms(use_true_random=False), abort=st.booleans())
    def resume(self, pick: random.Random, abort: bool) -> None:
        version = pick.choice(self.suspended)
        if abort:
            self.slots.forget_suspended(version)
            self.slots.registry.release(version)
            self.suspended.remove(version)
        elif self.slots.has_room_for(version):
            assert self.slots.start(version, resumed=True) is not None
            self.suspended.remove(version)
            self.running.append(version)

    @rule(name=st.sampled_from("abcd"))
    def unload(self, name: str) -> None:
        self.slots.registry.retire(name)

    @rule(name=st.sampled_from("abcd"), pin=st.booleans())
    def pin(self, name: str, pin: bool) -> None:
        with contextlib.suppress(AdapterError):
            (self.slots.pin if pin else self.slots.unpin)(name)

    @invariant()
    def every_slot_holds_its_own(self) -> None:
        if not hasattr(self, "slots"):
            return
        for slot, version in enumerate(self.slots._slots):
            if version is not None:
                assert version.slot == slot
                assert self.layer.slots[slot] == self.want[version]
        for version in self.running:
            assert version.slot is not None
            assert self.slots._slots[version.slot] is version
            assert version.adapter is not None or self.limit is not None

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "slots"):
            return
        held = self.slots.registry._held
        current = set(self.slots.registry.current())
        live = current | set(self.users) | set(self.running) | set(self.suspended)
        assert held <= live
        assert set(self.slots.resident) <= live
        busy = {version for version in held if not version.idle or version.retired}
        assert self.limit is None or len(held) <= max(self.limit, len(busy) + 1)
        for version in live:
            lists = (self.users, self.running, self.suspended)
            assert version.users == sum(own.count(version) for own in lists)
            assert version.running == self.running.count(version)
            assert version.preempted == self.suspended.count(version)


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
