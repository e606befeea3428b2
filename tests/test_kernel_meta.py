"""`KernelMeta` and `PackedInts`: the routing tables, against a slow one, and what is stale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.ops import NO_LORA, KernelMeta
from minilora.ops.packed import PackedInts

TABLES = [
    "token_lora_mapping",
    "token_indices_sorted_by_lora_ids",
    "active_lora_ids",
    "num_tokens_per_lora",
    "lora_token_start_loc",
]


def tables(meta: KernelMeta) -> list[list[int]]:
    return [getattr(meta, name).tolist() for name in TABLES]


def slow_tables(mapping: Sequence[int], padded: int, max_loras: int) -> list[list[int]]:
    """The five tables, one row after another."""
    rows_of = {slot: [row for row, s in enumerate(mapping) if s == slot] for slot in set(mapping)}
    active = sorted(slot for slot in rows_of if slot != NO_LORA)
    counts = [len(rows_of[slot]) for slot in active]
    idle = max_loras - len(active)
    order = [row for slot in active for row in rows_of[slot]]
    order += rows_of.get(NO_LORA, []) + list(range(len(mapping), padded))
    starts = [sum(counts[:i]) for i in range(len(active) + 1)]
    return [
        [*mapping, *[NO_LORA] * (padded - len(mapping))],
        order,
        active + [NO_LORA] * idle,
        counts + [0] * idle,
        starts + starts[-1:] * idle,
    ]


def test_the_running_example(device: str) -> None:
    meta = KernelMeta(max_tokens=8, max_loras=4, device=device)
    meta.prepare([2, NO_LORA, 0], num_tokens_padded=4, num_active_loras=2)
    assert tables(meta) == [
        [2, -1, 0, -1],
        [2, 0, 1, 3],
        [0, 2, -1, -1],
        [1, 1, 0, 0],
        [0, 1, 2, 2, 2],
    ]
    assert all(getattr(meta, name).dtype == torch.int32 for name in TABLES)


@given(
    mapping=st.lists(st.integers(NO_LORA, 6), max_size=20),
    padding=st.integers(0, 4),
    spare=st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_any_mapping(mapping: list[int], padding: int, spare: int) -> None:
    meta = KernelMeta(max_tokens=24, max_loras=7)
    padded, real = len(mapping) + padding, len(set(mapping) - {NO_LORA})
    assert meta.write(mapping, padded, min(real + spare, 7)) == real
    meta.prepare(mapping, padded, min(real + spare, 7))
    assert tables(meta) == slow_tables(mapping, padded, 7)


@pytest.mark.parametrize(
    "mapping",
    [
        [0] * 24,
        [6] * 24,
        [NO_LORA] * 24,
        [6, 0] * 12,
        [*range(7), *[NO_LORA] * 17],
        [*[NO_LORA] * 17, *reversed(range(7))],
        [],
    ],
    ids=["first", "last", "none", "ends", "all", "backwards", "empty"],
)
def test_extreme_mappings(mapping: list[int]) -> None:
    meta = KernelMeta(max_tokens=24, max_loras=7)
    meta.prepare(mapping, 24, 7)
    assert tables(meta) == slow_tables(mapping, 24, 7)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_mappings_of_any_integer_type(dtype: type[np.integer]) -> None:
    meta = KernelMeta(max_tokens=4, max_loras=4)
    meta.prepare(np.array([3, -1, 3], dtype=dtype), 4, 1)
    assert tables(meta) == slow_tables([3, -1, 3], 4, 4)


def test_many_slots() -> None:
    meta = KernelMeta(max_tokens=512, max_loras=256)
    mapping = [255 - row % 256 for row in range(512)]
    meta.prepare(mapping, 512, 256)
    assert tables(meta) == slow_tables(mapping, 512, 256)


# ---- nothing is stale


@given(
    before=st.lists(st.integers(NO_LORA, 3), max_size=12),
    after=st.lists(st.integers(NO_LORA, 3), max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_nothing_of_the_step_before_is_left(before: list[int], after: list[int]) -> None:
    """Every int on the device, also in rows that no view of this step shows."""
    sizes = KernelMeta.sizes(12, 4)
    used, fresh = PackedInts(sizes, "cpu"), PackedInts(sizes, "cpu")
    meta = KernelMeta(12, 4, packed=used)
    meta.write(before, 12, 4)
    used.upload()
    for memory in (*used.host.values(), used.tensor.numpy()):  # whatever else was there
        memory.fill(0x7F7F7F7F)
    meta.write(after, len(after), 4)
    used.upload()
    KernelMeta(12, 4, packed=fresh).write(after, len(after), 4)
    fresh.upload()
    assert torch.equal(used.tensor, fresh.tensor)


def test_a_new_meta_routes_nothing(device: str) -> None:
    """Graphs are captured before the first step: undefined tables would be in them (G6)."""
    assert tables(KernelMeta(3, 2, device)) == [[-1] * 3, [0, 1, 2], [-1, -1], [0, 0], [0, 0, 0]]


def test_reset() -> None:
    meta = KernelMeta(6, 4)
    meta.prepare([3, 3, 1, 0], 5, 3)
    meta.reset()
    meta.prepare([], 6, 0)
    assert tables(meta) == tables(KernelMeta(6, 4))
    meta.prepare([3, 3, 1, 0], 6, 3)
    meta.reset()
    assert tables(meta) == tables(KernelMeta(6, 4))


def test_addresses_never_change(device: str) -> None:
    meta = KernelMeta(8, 4, device)
    before = [getattr(meta, name).data_ptr() for name in TABLES]
    for mapping, padded in [([0], 1), ([1, 2, 3], 8), ([3, -1, 0], 4)]:
        meta.prepare(mapping, padded, 3)
        assert [getattr(meta, name).data_ptr() for name in TABLES] == before
    meta.reset()
    assert [getattr(meta, name).data_ptr() for name in TABLES] == before


def test_an_error_leaves_the_next_step_whole() -> None:
    meta = KernelMeta(4, 4)
    for mapping, padded, grid in [([0, 1], 4, 1), ([9], 4, 4), ([0] * 5, 5, 1)]:
        with pytest.raises(ValueError, match=r"num_|token_"):
            meta.prepare(mapping, padded, grid)
        meta.prepare([2, -1, 0], 4, 2)
        assert tables(meta) == slow_tables([2, -1, 0], 4, 4)


# ---- refusals


@pytest.mark.parametrize(
    ("mapping", "padded", "grid", "match"),
    [
        ([0] * 9, 9, 1, "num_tokens_padded=9 must be from 9 .* to 8"),
        ([0] * 3, 2, 1, "num_tokens_padded=2 must be from 3"),
        ([], -1, 0, "num_tokens_padded=-1"),
        ([0], 1, -1, "num_active_loras=-1 must be from 0 to max_loras=4"),
        ([0], 1, 5, "num_active_loras=5 must be from 0 to max_loras=4"),
        ([0, 1, 3], 3, 2, "num_active_loras=2 is less than the 3 adapters"),
        ([0], 1, 0, "num_active_loras=0 is less than the 1 adapters"),
        ([4], 1, 1, "slots from 4 to 4; they must be from -1 to 3"),
        ([0, -2], 2, 1, "slots from -2 to 0"),
    ],
)
def test_a_step_that_does_not_fit(mapping: list[int], padded: int, grid: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        KernelMeta(8, 4).prepare(mapping, padded, grid)


@pytest.mark.parametrize("slot", [1 << 15, 65535, 65536, 65536 + 2, 1 << 32, (1 << 32) - 1])
def test_a_slot_that_a_narrow_integer_would_wrap(slot: int) -> None:
    """65536 as an int16 is slot 0: another adapter, without an error."""
    for mapping in ([slot], np.array([slot]), np.array([0, slot], dtype=np.int64)):
        with pytest.raises(ValueError, match=str(slot)):
            KernelMeta(8, 4).prepare(mapping, 8, 4)


def test_slots_that_are_no_integers() -> None:
    with pytest.raises((TypeError, ValueError)):
        KernelMeta(8, 4).prepare(np.array([1.7]), 8, 4)


def test_without_slots() -> None:
    meta = KernelMeta(4, 0)
    meta.prepare([NO_LORA] * 3, 4, 0)
    assert tables(meta) == [[-1] * 4, [0, 1, 2, 3], [], [], [0]]
    with pytest.raises(ValueError, match="slots from 0 to 0"):
        meta.prepare([0], 4, 0)


# ---- one allocation, one copy


def test_packed_ints_send_everything_in_one_copy(device: str) -> None:
    packed = PackedInts({"a": 3, "b": 0, "c": 2}, device)
    packed.host["a"][:], packed.host["c"][:] = [1, 2, 3], [4, 5]
    assert packed.tensor.tolist() == [0] * 5, "nothing is sent before upload()"
    packed.upload()
    assert packed.tensor.tolist() == [1, 2, 3, 4, 5]
    assert {name: x.tolist() for name, x in packed.device.items()} == {
        "a": [1, 2, 3],
        "b": [],
        "c": [4, 5],
    }
    packed.host["a"].fill(9)
    assert packed.device["a"].tolist() == [1, 2, 3], "host and device share no memory"
    for step in range(10):  # more steps than pinned buffers
        packed.host["c"].fill(step)
        packed.upload()
        assert packed.device["c"].tolist() == [step, step]
    assert packed.device["a"].tolist() == [9, 9, 9]


def test_two_metas_in_one_buffer_do_not_touch_each_other() -> None:
    sizes = {**KernelMeta.sizes(6, 3, "x."), "between": 2, **KernelMeta.sizes(4, 3, "y.")}
    packed = PackedInts(sizes, "cpu")
    x, y = (
        KernelMeta(6, 3, packed=packed, prefix="x."),
        KernelMeta(4, 3, packed=packed, prefix="y."),
    )
    packed.host["between"].fill(77)
    x.write([2, 2, 0], 6, 2)
    y.write([0], 2, 2)
    packed.upload()
    assert tables(x) == slow_tables([2, 2, 0], 6, 3)
    assert tables(y) == slow_tables([0], 2, 3)
    assert packed.device["between"].tolist() == [77, 77]
    assert packed.tensor.numel() == sum(sizes.values())


def test_only_the_owner_uploads() -> None:
    packed = PackedInts(KernelMeta.sizes(4, 2), "cpu")
    meta = KernelMeta(4, 2, packed=packed)
    meta.prepare([1, 0], 4, 2)
    assert meta.active_lora_ids.tolist() == [0, 0]
    packed.upload()
    assert meta.active_lora_ids.tolist() == [0, 1]
