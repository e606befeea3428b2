"""The plain bodies of the LoRA ops, against a float64 loop over rows.

What must not be read is NaN, what must not be written is compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.ops import NO_LORA, KernelMeta, lora_expand, lora_shrink
from minilora.ops import shrink as shrink_module
from minilora.ops.embedding import lora_embedding_shrink

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXED = [2, -1, 0, 0, -1, 3, 2, -1, 2]


@dataclass
class Call:
    """One call of both ops. `mapping` gives each row's slot; whatever is dead holds NaN."""

    mapping: Sequence[int]
    width: int = 7
    outs: Sequence[int] = (5,)
    rank: int = 4
    slots: int = 4
    ranks: Sequence[int] | None = None
    dtype: torch.dtype = torch.float32
    padding: int = 0
    seed: int = 0
    meta: KernelMeta = field(init=False)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen).to(self.dtype)

        rows = len(self.mapping) + self.padding
        self.x, self.out = normal(rows, self.width), normal(rows, sum(self.outs))
        self.a = [normal(self.slots, self.rank, self.width) for _ in self.outs]
        self.b = [normal(self.slots, out, self.rank) for out in self.outs]
        self.lora_ranks = None
        if self.ranks is not None:
            self.lora_ranks = torch.tensor(self.ranks, dtype=torch.int32)
        self.meta = KernelMeta(rows, self.slots)
        self.meta.prepare(self.mapping, rows, len(self.active))
        self.kill_what_is_dead()

    @property
    def active(self) -> list[int]:
        return sorted(set(self.mapping) - {NO_LORA})

    @property
    def slot_of_row(self) -> list[int]:
        return [*self.mapping, *[NO_LORA] * self.padding]

    def rank_of(self, slot: int) -> int:
        return self.rank if self.ranks is None else self.ranks[slot]

    def kill_what_is_dead(self) -> None:
        """NaN in slots without rows, in ranks beyond those in use, in rows of no adapter."""
        for a, b in zip(self.a, self.b, strict=True):
            for slot in range(self.slots):
                used = self.rank_of(slot) if slot in self.active else 0
                a[slot, used:], b[slot, :, used:] = torch.nan, torch.nan
        for row, slot in enumerate(self.slot_of_row):
            if slot == NO_LORA or self.rank_of(slot) == 0:
                self.x[row] = torch.nan

    def shrink(self, grid: int | None = None) -> torch.Tensor:
        grid = len(self.active) if grid is None else grid
        return lora_shrink(self.x, self.a, self.meta, grid, self.lora_ranks)

    def expand(self, h: torch.Tensor, out: torch.Tensor, grid: int | None = None) -> torch.Tensor:
        grid = len(self.active) if grid is None else grid
        lora_expand(h, self.b, out, self.meta, grid, self.lora_ranks)
        return out

    def run(self, grid: int | None = None) -> torch.Tensor:
        return self.expand(self.shrink(grid), self.out.clone(), grid)

    def update_of_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be added to a row, in float64, and how far float32 sums may be from it.

        The bound is the one of any order of summation: terms times half an eps of float32,
        times the sum of the magnitudes (Higham, Accuracy and Stability, section 3.1).
        """
        slot = self.slot_of_row[row]
        r, x = self.rank_of(slot), self.x[row].double()
        weights = [
            (a[slot, :r].double(), b[slot, :, :r].double())
            for a, b in zip(self.a, self.b, strict=True)
        ]
        update = torch.cat([b @ (a @ x) for a, b in weights])
        magnitude = torch.cat([b.abs() @ (a.abs() @ x.abs()) for a, b in weights])
        terms = len(x) + r + 2
        return update, terms * torch.finfo(torch.float32).eps / 2 * magnitude

    def check(self, got: torch.Tensor, served: Sequence[int] | None = None) -> None:
        """Rows of the `served` slots (None: all) are right, all others as they were."""
        served = self.active if served is None else served
        for row, slot in enumerate(self.slot_of_row):
            if slot not in served or self.rank_of(slot) == 0:
                assert same_bits(got[row], self.out[row]), f"row {row} was touched"
                continue
            update, bound = self.update_of_row(row)
            want = self.out[row].double() + update
            # The sum with `out` in float32, and one rounding to the dtype of the output.
            rounding = torch.finfo(self.dtype).eps / 2 + torch.finfo(torch.float32).eps
            allowed = bound + rounding * (want.abs() + self.out[row].double().abs())
            assert ((got[row].double() - want).abs() <= allowed).all(), f"row {row} is wrong"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: -0.0 is not 0.0, and a NaN has a payload."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- right numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outs", [(5,), (8, 3, 3), (1, 1), (17, 1, 6)], ids=str)
@pytest.mark.parametrize("ranks", [None, (4, 0, 1, 3)], ids=str)
def test_mixed_batch(
    dtype: torch.dtype, outs: tuple[int, ...], ranks: tuple[int, ...] | None
) -> None:
    call = Call(MIXED, outs=outs, ranks=ranks, dtype=dtype, padding=3)
    call.check(call.run())


@pytest.mark.parametrize(
    "mapping",
    [[0], [3], [NO_LORA], [1] * 17, [NO_LORA] * 5, [3, 1], [0, 1, 2, 3], [3, -1, -1, 3], []],
    ids=str,
)
def test_small_mappings(mapping: list[int]) -> None:
    call = Call(mapping, padding=1)
    call.check(call.run())


@pytest.mark.parametrize("width", [1, 3, 48, 172, 344])
@pytest.mark.parametrize("rank", [1, 5, 16, 64])
def test_odd_sizes(width: int, rank: int) -> None:
    call = Call(MIXED, width=width, outs=(40, 3), rank=rank, ranks=(rank, 0, 1, (rank + 1) // 2))
    call.check(call.run())


@given(
    mapping=st.lists(st.integers(NO_LORA, 4), min_size=1, max_size=12),
    width=st.integers(1, 40),
    outs=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    ranks=st.none() | st.lists(st.integers(0, 9), min_size=5, max_size=5),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_any_call(
    mapping: list[int],
    width: int,
    outs: list[int],
    ranks: list[int] | None,
    dtype: torch.dtype,
    padding: int,
) -> None:
    call = Call(mapping, width, outs, 9, 5, ranks, dtype, padding)
    call.check(call.run())


def test_half_precision_is_summed_in_float32() -> None:
    """4096 + 1 + ... + 1 is 4096 in bfloat16, and a float16 product of 300 x 300 is infinite."""
    meta = KernelMeta(1, 1)
    meta.prepare([0], 1, 1)
    x = torch.ones(1, 513, dtype=torch.bfloat16)
    a = torch.ones(1, 1, 513, dtype=torch.bfloat16)
    a[0, 0, 0] = 4096
    assert lora_shrink(x, [a], meta, 1).item() == 4096 + 512
    big = torch.full((1, 4), 300.0, dtype=torch.float16)
    h = lora_shrink(big, [big[None]], meta, 1)
    assert h.item() == 4 * 300 * 300
    out = torch.zeros(1, 1, dtype=torch.float16)
    lora_expand(h, [torch.full((1, 1, 1), 1e-3, dtype=torch.float16)], out, meta, 1)
    assert out.item() == pytest.approx(360, rel=2e-3)


def test_a_second_call_adds_once_more_and_repeats_to_the_bit() -> None:
    call = Call(MIXED, width=64, rank=8)
    h, out = call.shrink(), call.run()
    for _ in range(50):
        assert same_bits(call.shrink(), h)
        assert same_bits(call.run(), out)


def test_expand_adds_to_what_is_there() -> None:
    call = Call([0, 1], width=3)
    once = call.run()
    twice = call.expand(call.shrink(), once.clone())
    torch.testing.assert_close(twice - once, once - call.out)


# ---- what is not read, and what is not written


def test_rows_of_no_adapter_keep_every_bit() -> None:
    call = Call([-1, 0, -1, -1], padding=2, dtype=torch.bfloat16)
    odd = torch.tensor([-0.0, torch.nan, torch.inf, 1e-40, -torch.inf]).bfloat16()
    odd.view(torch.int16)[1] = 0x7FA3  # a NaN with a payload
    call.out[[0, 2, 3, 4, 5]] = odd
    call.check(call.run())


def test_rows_of_an_adapter_that_is_not_in_this_layer_keep_every_bit() -> None:
    """Rank 0: adding a zero would turn -0.0 into 0.0."""
    call = Call([1, 0, 1], ranks=(4, 0, 4, 4))
    call.out[[0, 2]] = torch.tensor([-0.0, torch.nan, torch.inf, 1e-40, -0.0])
    call.check(call.run())


def test_expand_reads_no_h_of_other_rows_or_ranks() -> None:
    call = Call(MIXED, ranks=(4, 0, 1, 3), outs=(5, 2))
    h = call.shrink()
    for row, slot in enumerate(call.mapping):
        h[:, row, call.rank_of(slot) if slot >= 0 else 0 :] = torch.nan
    call.check(call.expand(h, call.out.clone()))


def test_shrink_writes_all_that_expand_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if new memory is full of NaN: the clearing is inside the op."""
    plain = shrink_module._new_h

    def dirty(x: torch.Tensor, lora_a: list[torch.Tensor]) -> torch.Tensor:
        return plain(x, lora_a).fill_(torch.nan)

    monkeypatch.setattr(shrink_module, "_new_h", dirty)
    call = Call(MIXED, ranks=(4, 0, 1, 3), outs=(5, 2))
    call.check(call.run())


def test_inputs_are_not_written() -> None:
    call = Call(MIXED, outs=(5, 2), ranks=(4, 0, 1, 3))
    inputs = [call.x, *call.a, *call.b, call.lora_ranks, call.meta.token_lora_mapping]
    before = [x.clone() for x in inputs if x is not None]
    h = call.shrink()
    kept = h.clone()
    call.expand(h, call.out.clone())
    after = [x for x in inputs if x is not None]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
    assert same_bits(h, kept)


def test_slots_with_gaps_take_the_right_weights() -> None:
    """Slot 3 alone is group 0: a body that takes the group for the slot reads NaN."""
    call = Call([3, 3], padding=2)
    call.check(call.run())


# ---- strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_x_is_a_slice_of_a_wider_buffer(dtype: torch.dtype) -> None:
    call = Call(MIXED, width=6, dtype=dtype)
    wide = torch.full((len(MIXED), 20), torch.nan, dtype=dtype)
    wide[:, 7:13] = call.x
    call.x = wide[:, 7:13]
    assert call.x.stride() == (20, 1)
    call.check(call.run())


@pytest.mark.parametrize("view", ["every second row", "transposed", "backwards base"])
def test_other_strides_of_x(view: str) -> None:
    call = Call(MIXED, width=6)
    rows = len(MIXED)
    if view == "every second row":
        base = torch.full((2 * rows, 6), torch.nan)
        base[::2] = call.x
        call.x = base[::2]
    elif view == "transposed":
        call.x = call.x.T.contiguous().T
    else:
        call.x = torch.cat([torch.full((3, 6), torch.nan), call.x])[3:]
    call.check(call.run())


@pytest.mark.parametrize("transposed", [False, True])
def test_out_is_a_view(transposed: bool) -> None:
    call = Call(MIXED, outs=(4, 2))
    guard = torch.full((len(MIXED) + 2, 12), 123.0)
    if transposed:
        guard = guard.T.contiguous().T
    out = guard[1:-1, 3:9]
    out.copy_(call.out)
    call.expand(call.shrink(), out)
    call.check(out)
    guard[1:-1, 3:9] = 123.0
    assert bool((guard == 123.0).all()), "the view's neighbours were written"


# ---- the launch grid


def test_a_grid_that_is_too_small_drops_exactly_the_last_groups() -> None:
    call = Call(MIXED, padding=2, outs=(5, 2))
    assert call.active == [0, 2, 3]
    for grid, served in [(0, []), (1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 2, 3])]:
        call.check(call.run(grid), served)


def test_a_grid_too_small_for_one_op_alone_shows_too() -> None:
    call = Call(MIXED)
    call.check(call.expand(call.shrink(2), call.out.clone(), 3), [0, 2])
    call.check(call.expand(call.shrink(3), call.out.clone(), 2), [0, 2])


def test_a_negative_grid_is_refused() -> None:
    # As the end of a Python slice, -1 would serve all groups but the last.
    call = Call([0, 1, 2])
    with pytest.raises(ValueError, match="num_active_loras=-1"):
        call.shrink(-1)
    with pytest.raises(ValueError, match="num_active_loras=-1"):
        call.expand(call.shrink(), call.out.clone(), -1)


def test_broken_variant_minus_one_counted_as_a_group() -> None:
    """vLLM 0.24: [A, none, B] gets three groups and a grid of two; A (slot 2) is dropped."""
    call = Call([2, NO_LORA, 0])
    call.check(call.run())
    call.meta.active_lora_ids.copy_(torch.tensor([-1, 0, 2, -1]))
    call.meta.num_tokens_per_lora.copy_(torch.tensor([1, 1, 1, 0]))
    call.meta.token_indices_sorted_by_lora_ids.copy_(torch.tensor([1, 2, 0]))
    got = call.run(grid=2)
    assert same_bits(got[0], call.out[0]), "the row of slot 2 got nothing at all"
    with pytest.raises(AssertionError, match="row 0 is wrong"):
        call.check(got)
    call.check(got, [0])
    call.check(call.run(grid=3))


def test_broken_variant_stale_grid() -> None:
    """A grid frozen at the capture with one adapter, replayed with two."""
    call = Call([2, NO_LORA, 0])
    call.meta.prepare([2, NO_LORA], 3, 1)  # the capture
    with pytest.raises(ValueError, match="the grid would drop rows"):
        call.meta.prepare(call.mapping, 3, 1)
    call.meta.prepare(call.mapping, 3, 2)
    got = call.run(grid=1)
    with pytest.raises(AssertionError, match="row 0 is wrong"):
        call.check(got)
    call.check(got, [0])


def test_broken_variant_a_slot_reused_without_clearing() -> None:
    """Rank 4 was in the slot, rank 2 is written over it, and the old ranks are still there."""
    call = Call([1, 1], ranks=(4, 2, 4, 4))
    call.check(call.run())
    call.a[0][1, 2:], call.b[0][1, :, 2:] = 1.0, 1.0
    call.check(call.run())  # `lora_ranks` alone hides them
    call.lora_ranks = None
    with pytest.raises(AssertionError, match="is wrong"):
        call.check(call.run())


# ---- refusals


@pytest.mark.parametrize("rows", [2, 4, 0])
def test_rows_that_the_metadata_does_not_describe(rows: int) -> None:
    """K6: metadata of all tokens, an input of the sampled ones."""
    call = Call([0, 1, -1])
    pattern = f"got {rows} rows, but its KernelMeta describes 3"
    with pytest.raises(ValueError, match=f"lora_shrink {pattern}"):
        lora_shrink(torch.zeros(rows, 7), call.a, call.meta, 2)
    with pytest.raises(ValueError, match=f"lora_expand {pattern}"):
        lora_expand(call.shrink(), call.b, torch.zeros(rows, 5), call.meta, 2)
    with pytest.raises(ValueError, match=f"lora_embedding_shrink {pattern}"):
        lora_embedding_shrink(torch.zeros(rows, dtype=torch.int32), call.a[0], call.meta)


@pytest.mark.parametrize("rows", [2, 4])
def test_an_h_of_other_rows_is_refused(rows: int) -> None:
    call = Call([0, 1, -1])
    with pytest.raises(ValueError, match=f"got {rows} rows"):
        lora_expand(torch.zeros(1, rows, 4), call.b, call.out.clone(), call.meta, 2)


def test_slices_that_do_not_fit_the_output() -> None:
    call = Call([0, 1], outs=(5, 2))
    h = call.shrink()
    for out in (torch.zeros(2, 8), torch.zeros(2, 6)):
        with pytest.raises((ValueError, RuntimeError)):
            lora_expand(h, call.b, out, call.meta, 2)
    with pytest.raises((ValueError, RuntimeError)):
        lora_expand(h[:1], call.b, call.out.clone(), call.meta, 2)


# ---- embedding

VOCAB = 11


def embedding_call(
    mapping: list[int], ranks: list[int]
) -> tuple[torch.Tensor, torch.Tensor, KernelMeta]:
    gen = torch.Generator().manual_seed(1)
    a = torch.randn(4, VOCAB, 3, generator=gen)  # transposed: a row a token
    for slot in range(4):
        a[slot, :, ranks[slot] if slot in mapping else 0 :] = torch.nan
    ids = torch.randint(0, VOCAB, (len(mapping),), generator=gen, dtype=torch.int32)
    meta = KernelMeta(len(mapping), 4)
    meta.prepare(mapping, len(mapping), len(set(mapping) - {NO_LORA}))
    return ids, a, meta


def test_embedding_shrink_is_a_look_up() -> None:
    ids, a, meta = embedding_call(MIXED, [3] * 4)
    before = ids.clone()
    h = lora_embedding_shrink(ids, a, meta)
    assert h.shape == (1, len(MIXED), 3)
    assert h.dtype == torch.float32
    assert torch.equal(ids, before)
    for row, slot in enumerate(MIXED):
        want = a[slot, ids[row]] if slot >= 0 else torch.zeros(3)
        assert torch.equal(h[0, row], want), f"row {row}"


def test_embedding_with_mixed_ranks_and_a_small_grid() -> None:
    ranks = [3, 0, 1, 2]
    ids, a, meta = embedding_call(MIXED, ranks)
    gen = torch.Generator().manual_seed(2)
    b, base = torch.randn(4, 6, 3, generator=gen), torch.randn(len(MIXED), 6, generator=gen)
    for grid, served in [(3, {0, 2, 3}), (2, {0, 2})]:
        out = base.clone()
        h = lora_embedding_shrink(ids, a, meta)
        lora_expand(h, [b], out, meta, grid, torch.tensor(ranks, dtype=torch.int32))
        for row, slot in enumerate(MIXED):
            if slot not in served:
                assert same_bits(out[row], base[row])
                continue
            r = ranks[slot]
            update = b[slot, :, :r].double() @ a[slot, ids[row], :r].double()
            torch.testing.assert_close(out[row].double(), base[row] + update, rtol=0, atol=2e-6)


def test_no_adapter_in_slot_zero_that_is_nan() -> None:
    """Rows without an adapter look at some slot too; what lies there must not come through."""
    ids, a, meta = embedding_call([NO_LORA, NO_LORA], [3] * 4)
    assert bool(a.isnan().all())
    assert torch.equal(lora_embedding_shrink(ids, a, meta), torch.zeros(1, 2, 3))


# ---- torch.library


def shrink_args(call: Call) -> tuple[object, ...]:
    return call.x, call.a, *call.meta.tables, call.lora_ranks, len(call.active)


def expand_args(call: Call) -> tuple[object, ...]:
    return call.shrink(), call.b, call.out, *shrink_args(call)[2:]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.ops.minilora.lora_shrink.default, shrink_args),
        (torch.ops.minilora.lora_expand.default, expand_args),
    ],
    ids=["shrink", "expand"],
)
@pytest.mark.parametrize("ranks", [None, (4, 0, 1, 3)], ids=str)
def test_opcheck(
    op: torch._ops.OpOverload,
    args: Callable[[Call], tuple[object, ...]],
    ranks: tuple[int, ...] | None,
) -> None:
    call = Call(MIXED, outs=(4, 2), ranks=ranks, dtype=torch.bfloat16)
    call.x.nan_to_num_(0.0)  # opcheck compares, and NaN is never equal
    torch.library.opcheck(op, args(call))


def test_opcheck_with_views() -> None:
    call = Call(MIXED, width=6, outs=(4, 2))
    call.x = torch.zeros(len(MIXED), 9)[:, 1:7].copy_(call.x.nan_to_num(0.0))
    call.out = torch.zeros(len(MIXED), 9)[:, 2:8].copy_(call.out)
    torch.library.opcheck(torch.ops.minilora.lora_shrink.default, shrink_args(call))
    torch.library.opcheck(torch.ops.minilora.lora_expand.default, expand_args(call))


def test_many_random_batches_against_each_other() -> None:
    """A row's result depends on its own adapter, not on who shares the batch."""
    rng = random.Random(3)
    alone: dict[int, torch.Tensor] = {}
    for _ in range(20):
        mapping = [rng.choice([-1, 0, 1, 2, 3]) for _ in range(8)]
        call = Call(mapping, ranks=(4, 1, 2, 3))
        weights = Call([0, 1, 2, 3], ranks=(4, 1, 2, 3))
        call.a, call.b = weights.a, weights.b
        call.x[:], call.out[:] = 0.5, 0.25
        for row, slot in zip(call.run(), mapping, strict=True):
            known = alone.setdefault(slot, row)
            torch.testing.assert_close(row, known, rtol=0, atol=2e-6)
    assert len({tuple(row.tolist()) for row in alone.values()}) == 5
