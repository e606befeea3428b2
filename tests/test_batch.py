"""`Batch`, `StepBuffers` and `BlockPool`: one step on the host, and its fixed tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.batch import NO_LORA, Batch, BatchDescriptor, BatchRow, GraphMode, StepContext
from minilora.engine.blocks import BlockPool
from minilora.step_buffers import StepBuffers

TENSORS = [
    "input_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "context_lens",
    "sample_indices",
]


class Buffers(StepBuffers):
    """Takes a uniform descriptor for a FULL step, as the dispatcher's are."""

    def write(
        self, batch: Batch, descriptor: BatchDescriptor, mode: GraphMode | None = None
    ) -> StepContext:
        default = GraphMode.FULL if descriptor.uniform else GraphMode.PIECEWISE
        return super().write(batch, descriptor, mode or default)


def new_buffers(device: str = "cpu", **changes: int) -> StepBuffers:
    sizes = {
        "max_num_tokens": 32,
        "max_num_seqs": 8,
        "max_blocks": 4,
        "block_size": 4,
        "max_loras": 4,
    }
    return Buffers(**{**sizes, **changes}, device=device)


def row(
    tokens: Sequence[int],
    start: int = 0,
    blocks: Sequence[int] = (1,),
    slot: int = NO_LORA,
    samples: bool = True,
) -> BatchRow:
    return BatchRow(tokens, start, blocks, slot, samples)


def values(step: StepContext) -> dict[str, Any]:
    """Everything of a step that a forward reads, as plain lists and ints."""
    found: dict[str, Any] = {name: getattr(step, name).tolist() for name in TENSORS}
    metas = ["meta"] if step.mode is GraphMode.FULL else ["meta", "sample_meta"]
    for meta in metas:
        for name in ("token_lora_mapping", "active_lora_ids", "num_tokens_per_lora"):
            found[f"{meta}.{name}"] = getattr(getattr(step, meta), name).tolist()
    for name in ("num_decodes", "max_context_len", "prefill_query_lens", "prefill_context_lens"):
        found[name] = getattr(step, name)
    return found


# ---- one step


def test_the_running_example(device: str) -> None:
    """Adapter A in slot 2, no adapter, adapter B in slot 0, padded to four rows."""
    batch = Batch((row([7], 4, [1, 2], 2), row([8], 0, [3]), row([9], 8, [6, 4, 5], 0)))
    assert (batch.num_tokens, batch.uniform, batch.num_real_loras) == (3, True, 2)
    descriptor = BatchDescriptor(num_tokens=4, num_active_loras=2, uniform=True)
    step = new_buffers(device).write(batch, descriptor)
    assert values(step) == {
        "input_ids": [7, 8, 9, 0],
        "positions": [4, 0, 8, 0],
        "slot_mapping": [2 * 4 + 0, 3 * 4 + 0, 5 * 4 + 0, 0],
        "block_tables": [[1, 2, 0, 0], [3, 0, 0, 0], [6, 4, 5, 0], [0, 0, 0, 0]],
        "context_lens": [5, 1, 9, 0],
        "sample_indices": [0, 1, 2],
        "num_decodes": 4,
        "max_context_len": 16,
        "prefill_query_lens": (),
        "prefill_context_lens": (),
        "meta.token_lora_mapping": [2, -1, 0, -1],
        "meta.active_lora_ids": [0, 2, -1, -1],
        "meta.num_tokens_per_lora": [1, 1, 0, 0],
    }
    assert step.num_active_loras == 2
    assert step.meta.token_indices_sorted_by_lora_ids.tolist() == [2, 0, 1, 3]
    assert step.meta.lora_token_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert all(getattr(step, name).dtype == torch.int32 for name in TENSORS)


def test_only_a_full_step_has_its_python_values_from_the_descriptor() -> None:
    """A FULL graph freezes them; attention outside a graph reads the real rows alone."""
    batch = Batch((row([7], 4, [1, 2], 2), row([9], 8, [6, 4, 5], 0)))
    buffers = new_buffers()
    full = buffers.write(batch, BatchDescriptor(4, 2, True), GraphMode.FULL)
    assert (full.num_decodes, full.max_context_len, full.num_attention_rows) == (4, 16, 4)
    assert full.block_tables.shape == (4, 4)
    for mode in (GraphMode.PIECEWISE, GraphMode.NONE):
        step = buffers.write(batch, BatchDescriptor(4, 2, False), mode)
        assert (step.num_decodes, step.max_context_len, step.num_attention_rows) == (2, 9, 2)
        assert step.block_tables.shape == (2, 4)


def test_decode_and_prefill_rows_in_one_step() -> None:
    """A decode, a first chunk of one token that does not sample, a chunk, and a last chunk."""
    batch = Batch(
        (
            row([5], 3, [7], 1),
            row([6], 0, [1], 3, samples=False),
            row([10, 11, 12], 2, [2, 3], 1, samples=False),
            row([20, 21, 22, 23, 24], 6, [9, 4, 8]),
        )
    )
    assert (batch.num_tokens, batch.uniform, batch.num_real_loras) == (10, False, 2)
    step = new_buffers().write(batch, BatchDescriptor(10, 2, False))
    assert values(step) == {
        "input_ids": [5, 6, 10, 11, 12, 20, 21, 22, 23, 24],
        "positions": [3, 0, 2, 3, 4, 6, 7, 8, 9, 10],
        "slot_mapping": [31, 4, 10, 11, 12, 18, 19, 32, 33, 34],
        "block_tables": [[7, 0, 0, 0], [1, 0, 0, 0], [2, 3, 0, 0], [9, 4, 8, 0]],
        "context_lens": [4, 1, 5, 11],
        "sample_indices": [0, 9],
        "num_decodes": 2,
        "max_context_len": 4,
        "prefill_query_lens": (3, 5),
        "prefill_context_lens": (5, 11),
        "meta.token_lora_mapping": [1, 3, 1, 1, 1, -1, -1, -1, -1, -1],
        "meta.active_lora_ids": [1, 3, -1, -1],
        "meta.num_tokens_per_lora": [4, 1, 0, 0],
        "sample_meta.token_lora_mapping": [1, -1],
        "sample_meta.active_lora_ids": [1, -1, -1, -1],
        "sample_meta.num_tokens_per_lora": [1, 0, 0, 0],
    }


def test_padding_rows_touch_nobody() -> None:
    """Id 0, in block 0, of length 0, without adapter (G2); also where the batch is empty."""
    for batch in (Batch(()), Batch((row([5], 3, [7], 1),))):
        real = len(batch.rows)
        step = new_buffers().write(batch, BatchDescriptor(6, batch.num_real_loras, True))
        for name, padding in [
            ("input_ids", 0),
            ("positions", 0),
            ("slot_mapping", 0),
            ("context_lens", 0),
            ("block_tables", [0] * 4),
        ]:
            got = getattr(step, name).tolist()
            assert len(got) == 6
            assert got[real:] == [padding] * (6 - real), name
        assert step.meta.token_lora_mapping.tolist()[real:] == [NO_LORA] * (6 - real)
        assert step.sample_indices.shape == (real,)
        assert step.num_decodes == 6


def test_padded_rows_of_a_step_that_is_not_uniform() -> None:
    """They belong to no request: neither to a decode nor to a prefill."""
    batch = Batch((row([5], 3, [7], 1), row([1, 2, 3], 0, [2], 1)))
    step = new_buffers().write(batch, BatchDescriptor(8, 1, False))
    assert step.input_ids.tolist() == [5, 1, 2, 3, 0, 0, 0, 0]
    assert step.slot_mapping.tolist() == [31, 8, 9, 10, 0, 0, 0, 0]
    assert step.meta.token_lora_mapping.tolist() == [1, 1, 1, 1, -1, -1, -1, -1]
    assert (step.num_decodes, step.prefill_query_lens) == (1, (3,))
    assert step.block_tables.shape == (2, 4)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_slots_across_block_borders(block_size: int) -> None:
    blocks = [9, 2, 14, 5, 11, 3, 8, 1, 30, 6, 21, 7]
    buffers = new_buffers(max_blocks=12, block_size=block_size)
    for start, stop in itertools.combinations(range(min(12, 12 * block_size) + 1), 2):
        batch = Batch((row([1] * (stop - start), start, blocks),))
        step = buffers.write(batch, BatchDescriptor(stop - start, 0, stop - start == 1))
        want = [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        assert step.slot_mapping.tolist() == want


def test_without_lora() -> None:
    buffers = new_buffers(max_loras=0)
    step = buffers.write(Batch((row([5], 3, [7]),)), BatchDescriptor(2, 0, True))
    assert step.meta.token_lora_mapping.tolist() == [-1, -1]
    assert step.meta.active_lora_ids.shape == (0,)
    with pytest.raises(ValueError, match="slots from 0"):
        buffers.write(Batch((row([5], 3, [7], 0),)), BatchDescriptor(2, 0, True))


def test_a_grid_larger_than_the_step_needs() -> None:
    """As a graph captured for three adapters sees one."""
    batch = Batch((row([5], 3, [7], 1),))
    step = new_buffers().write(batch, BatchDescriptor(4, 3, True))
    assert step.num_active_loras == 3
    assert step.meta.active_lora_ids.tolist() == [1, -1, -1, -1]


# ---- nothing is stale


def random_batch(rng: random.Random) -> Batch:
    """Any step that the buffers of these tests hold."""
    rows = []
    for _ in range(rng.randint(0, 8)):
        count = rng.choice([1, 1, 1, 2, 3, 4])
        start = rng.randint(0, 16 - count)
        blocks = rng.sample(range(1, 40), -(-(start + count) // 4))
        tokens = [rng.randint(1, 999) for _ in range(count)]
        rows.append(row(tokens, start, blocks, rng.randint(-1, 3), rng.random() < 0.7))
    return Batch(tuple(sorted(rows, key=lambda r: len(r.token_ids) != 1)))


def random_descriptor(batch: Batch, rng: random.Random) -> BatchDescriptor:
    """Padded at random, within the buffers."""
    uniform = batch.uniform and rng.random() < 0.7
    padded = rng.randint(batch.num_tokens, 8 if uniform else 32)
    return BatchDescriptor(padded, rng.randint(batch.num_real_loras, 4), uniform)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_nothing_of_the_steps_before_is_left(seed: int) -> None:
    """Every int on the device is as in new buffers, also in rows that no view shows."""
    rng = random.Random(seed)
    used = new_buffers()
    for _ in range(3):
        batch = random_batch(rng)
        descriptor = random_descriptor(batch, rng)
        for memory in (*used.packed.host.values(), used.packed.tensor.numpy()):
            memory.fill(0x7F7F7F7F)  # whatever else was there
        step = used.write(batch, descriptor)
        fresh = new_buffers()
        want = values(fresh.write(batch, descriptor))
        assert values(step) == want
        assert torch.equal(used.packed.tensor, fresh.packed.tensor)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_step(seed: int) -> None:
    """Against lists written one token after another."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    descriptor = random_descriptor(batch, rng)
    step = new_buffers().write(batch, descriptor)
    got, at = values(step), 0
    samples = []
    for index, r in enumerate(batch.rows):
        for position, token in enumerate(r.token_ids, r.start):
            slot = r.block_ids[position // 4] * 4 + position % 4
            tokens = got["input_ids"][at], got["positions"][at], got["slot_mapping"][at]
            assert tokens == (token, position, slot)
            assert got["meta.token_lora_mapping"][at] == r.lora_slot
            at += 1
        assert got["context_lens"][index] == r.start + len(r.token_ids)
        assert got["block_tables"][index][: len(r.block_ids)] == list(r.block_ids)
        samples += [(at - 1, r.lora_slot)] if r.samples else []
    assert at == batch.num_tokens
    assert got["sample_indices"] == [row for row, _ in samples]
    if step.mode is not GraphMode.FULL:
        assert got["sample_meta.token_lora_mapping"] == [slot for _, slot in samples]
    for name in ("input_ids", "positions", "slot_mapping"):
        assert got[name][at:] == [0] * (descriptor.num_tokens - at)


def test_addresses_never_change(device: str) -> None:
    buffers = new_buffers(device)
    rng = random.Random(1)
    seen = set()
    for _ in range(20):
        batch = random_batch(rng)
        step = buffers.write(batch, BatchDescriptor(batch.num_tokens, 4, False))
        tensors = [getattr(step, name) for name in TENSORS]
        if all(tensor.numel() for tensor in tensors):
            seen.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(seen) == 1


def test_a_step_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = new_buffers()
    copies = []
    plain = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, *rest: bool) -> torch.Tensor:
        copies.append(self.shape)
        return plain(self, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    buffers.write(random_batch(random.Random(2)), BatchDescriptor(32, 4, False))
    assert copies == [buffers.packed.tensor.shape]


def test_the_next_step_on_the_host_does_not_reach_this_one() -> None:
    """The views read device memory: writing host arrays changes nothing before the upload."""
    buffers = new_buffers()
    step = buffers.write(Batch((row([5], 3, [7], 1),)), BatchDescriptor(1, 1, True))
    before = values(step)
    for array in buffers.packed.host.values():
        array.fill(55)
    assert values(step) == before


# ---- refusals


def test_no_adapter_is_not_counted() -> None:
    for slots, count in [((), 0), ((NO_LORA,), 0), ((NO_LORA, 0), 1), ((0, 3, NO_LORA, 3), 2)]:
        batch = Batch(tuple(row([1], slot=slot) for slot in slots))
        assert batch.num_real_loras == count


def test_a_batch_lists_single_tokens_first() -> None:
    for lengths in ([2, 1], [1, 2, 1], [0], [1, 0], [1, 2, 0]):
        with pytest.raises(ValueError, match="one token first, none without a token"):
            Batch(tuple(row([1] * n, 0, [1]) for n in lengths))
    assert Batch(tuple(row([1] * n) for n in (1, 1, 3, 2))).num_tokens == 7


def test_descriptor() -> None:
    assert BatchDescriptor(4, 1, True).has_lora
    assert not BatchDescriptor(4, 0, True).has_lora
    assert len({BatchDescriptor(4, 0, True), BatchDescriptor(4, 0, True)}) == 1


@pytest.mark.parametrize(
    ("batch", "descriptor"),
    [
        (Batch((row([1] * 33, 0, range(1, 10)),)), BatchDescriptor(33, 0, False)),
        (Batch((row([1] * 5, 0, [1, 2]),)), BatchDescriptor(4, 0, False)),
        (Batch((row([1]),)), BatchDescriptor(33, 0, False)),
        (Batch((row([1]),) * 9), BatchDescriptor(9, 0, True)),
        (Batch((row([1] * 5, 0, [1]),)), BatchDescriptor(5, 0, False)),
        (Batch((row([1], 0, [1, 2, 3, 4, 5]),)), BatchDescriptor(1, 0, True)),
        (Batch((row([1], slot=4),)), BatchDescriptor(1, 1, True)),
        (Batch((row([1], slot=-2),)), BatchDescriptor(1, 1, True)),
        (Batch((row([1], slot=65536),)), BatchDescriptor(1, 1, True)),
        (Batch((row([1], slot=0), row([1], slot=1))), BatchDescriptor(2, 1, True)),
        (Batch((row([1], slot=0),)), BatchDescriptor(1, 0, True)),
    ],
    ids=[
        "more tokens than rows",
        "padded to less",
        "padded past the buffer",
        "more requests than rows",
        "too few blocks",
        "too many blocks",
        "slot 4 of 4",
        "slot -2",
        "slot 65536",
        "grid too small",
        "no grid",
    ],
)
def test_a_step_that_does_not_fit_is_refused(batch: Batch, descriptor: BatchDescriptor) -> None:
    buffers = new_buffers()
    with pytest.raises((ValueError, IndexError)):
        buffers.write(batch, descriptor)
    fine = Batch((row([5], 3, [7], 1),))
    want = values(new_buffers().write(fine, BatchDescriptor(2, 1, True)))
    assert values(buffers.write(fine, BatchDescriptor(2, 1, True))) == want


def test_a_uniform_descriptor_for_a_prefill_is_refused() -> None:
    """Its rows would be taken for requests: the prompt's second token for another request."""
    batch = Batch((row([1, 2, 3], 0, [1]),))
    with pytest.raises(ValueError, match="uniform"):
        new_buffers().write(batch, BatchDescriptor(4, 0, True))


def test_a_uniform_descriptor_of_more_rows_than_requests_fit_is_refused() -> None:
    """The tables of the rows past max_num_seqs do not exist."""
    with pytest.raises(ValueError, match="num_tokens=9"):
        new_buffers().write(Batch((row([1]),)), BatchDescriptor(9, 0, True))


# ---- BlockPool


def test_blocks_for() -> None:
    pool = BlockPool(10, 4)
    assert [pool.blocks_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_extend_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    mine: list[int] = []
    other: list[int] = []
    assert pool.extend(mine, 5)
    assert (len(mine), pool.num_free) == (2, 1)
    held = list(mine)
    assert not pool.extend(mine, 17)
    assert (mine, pool.num_free) == (held, 1)
    assert pool.extend(mine, 3), "fewer tokens than it holds: nothing to do"
    assert pool.extend(mine, 8)
    assert (mine, pool.num_free) == (held, 1)
    assert pool.extend(other, 4)
    assert not pool.extend(other, 5)
    assert pool.num_free == 0
    pool.release(mine)
    assert (mine, pool.num_free) == ([], 2)
    pool.release(mine)
    assert pool.num_free == 2, "a list that was released holds nothing to release again"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_block_is_lost_or_shared(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12, 4)
    owners: list[list[int]] = [[] for _ in range(5)]
    for _ in range(60):
        blocks = rng.choice(owners)
        if rng.random() < 0.3:
            pool.release(blocks)
        else:
            target = rng.randint(0, 40)
            fits = pool.blocks_for(target) - len(blocks) <= pool.num_free
            before = list(blocks)
            assert pool.extend(blocks, target) == fits
            assert blocks[: len(before)] == before, "blocks in use keep their order"
            assert len(blocks) == (
                max(len(before), pool.blocks_for(target)) if fits else len(before)
            )
        held = [block for blocks in owners for block in blocks]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(1, 13)), "block 0 is nobody's"
        assert pool.num_free == 12 - len(held)
    for blocks in owners:
        pool.release(blocks)
    everything: list[int] = []
    assert pool.extend(everything, 48)
    assert sorted(everything) == list(range(1, 13))
