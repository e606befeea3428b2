"""Broken variants of the LoRA ops: each gives the wrong value, and the check catches it.

The check is the one that the right ops pass: every row of an adapter against float64, every
other row bit for bit. Variants that need a kernel of their own (the missing reset under real
atomic adds, unsorted rows and a stale grid in Triton) are in `test_triton_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import pytest
import torch

from minilora.ops import NO_LORA
from minilora.ops import shrink as shrink_module
from tests.test_lora_ops import Call, same_bits

EXAMPLE = [2, NO_LORA, 0]  # A in slot 2, no adapter, B in slot 0


def caught(call: Call, got: torch.Tensor, row: int) -> None:
    """The value of one row is wrong by far more than rounding, and the check says which."""
    want = call.out[row].double() + call.update_of_row(row)[0]
    assert not torch.allclose(got[row].double(), want, rtol=0.01)
    with pytest.raises(AssertionError, match=r"row \d+ (is wrong|was touched)"):
        call.check(got)


def set_tables(call: Call, active: list[int], counts: list[int], order: list[int]) -> None:
    call.meta.active_lora_ids.copy_(torch.tensor(active))
    call.meta.num_tokens_per_lora.copy_(torch.tensor(counts))
    call.meta.token_indices_sorted_by_lora_ids.copy_(torch.tensor(order))


def test_the_check_passes_what_is_right() -> None:
    call = Call(EXAMPLE, padding=1)
    call.check(call.run())


# ---- the buffer of a split-K shrink: a second step finds what the first one left


def split_k(call: Call, h: torch.Tensor, *, reset: bool, splits: int = 3) -> torch.Tensor:
    """The classical shrink: each split adds its part into one buffer."""
    if reset:
        h.zero_()
    for row, slot in enumerate(call.slot_of_row):
        if slot != NO_LORA:
            for k in torch.arange(call.width).chunk(splits):
                for piece, a in zip(h, call.a, strict=True):
                    piece[row] += a[slot][:, k] @ call.x[row, k]
    return h


@pytest.mark.parametrize("left", [0.0, torch.nan], ids=["a step", "what memory held"])
def test_no_reset(left: float) -> None:
    """vLLM #25914: whoever clears the buffer must do it in every step, in the op."""
    call = Call(EXAMPLE, padding=1)
    h = torch.full((1, 4, call.rank), left)
    call.check(call.expand(split_k(call, h.clone(), reset=True), call.out.clone()))
    once = split_k(call, h, reset=False)
    if left == 0.0:  # the first step is right, by luck, and so a test of one step is not enough
        call.check(call.expand(once, call.out.clone()))
    twice = split_k(call, once, reset=False)
    caught(call, call.expand(twice, call.out.clone()), 0)


def test_empty_instead_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expand that trusts what shrink never wrote, over memory that is not zero.

    The real expand reads no h of rows without an adapter, so dirty memory does no harm there;
    one that runs over all rows, counting on their h being zero, spreads it.
    """

    def dirty(x: torch.Tensor, lora_a: list[torch.Tensor]) -> torch.Tensor:
        shape = len(lora_a), x.shape[0], lora_a[0].shape[1]
        return torch.full(shape, 7.0)

    def expand_all_rows(call: Call, h: torch.Tensor) -> torch.Tensor:
        b = call.b[0].nan_to_num(1.0)
        slots = call.meta.token_lora_mapping.clamp(min=0).long()
        return call.out + torch.einsum("tr,tnr->tn", h[0], b[slots])

    call = Call(EXAMPLE, padding=1)
    call.check(expand_all_rows(call, call.shrink()))  # zeros: right
    monkeypatch.setattr(shrink_module, "_new_h", dirty)
    call.check(call.run())
    got = expand_all_rows(call, call.shrink())
    assert not same_bits(got[1], call.out[1])
    with pytest.raises(AssertionError, match="row 1 was touched"):
        call.check(got)


# ---- tables and grids


def groups_counting_none(mapping: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Sort by slot, -1 first and a group like any other; what vLLM 0.24's metadata lists."""
    order = sorted(range(len(mapping)), key=lambda row: mapping[row])
    runs = groupby(order, key=lambda row: mapping[row])
    groups = [(slot, len(list(rows))) for slot, rows in runs]
    return [slot for slot, _ in groups], [count for _, count in groups], order


@pytest.mark.parametrize("mapping", [EXAMPLE, [0, -1, -1, -1], [-1, 1, -1, 3], [3, -1, 1, 0]])
def test_minus_one_counted_as_a_group(mapping: list[int]) -> None:
    """The grid counts adapters, the tables count -1 too: the last adapter falls off the grid."""
    call = Call(mapping)
    call.check(call.run())
    active, counts, order = groups_counting_none(mapping)
    assert active[0] == NO_LORA
    idle = 4 - len(active)
    set_tables(call, active + [NO_LORA] * idle, counts + [0] * idle, order)
    got = call.run()
    last = mapping.index(max(mapping))
    assert same_bits(got[last], call.out[last]), "it got nothing at all"
    caught(call, got, last)


@pytest.mark.parametrize("captured", [0, 1, 2])
def test_a_grid_from_a_stale_count(captured: int) -> None:
    """Frozen with fewer adapters than the step that is replayed has."""
    call = Call([3, NO_LORA, 0, 1])
    got = call.run(grid=captured)
    caught(call, got, 0)  # slot 3 is the last group
    call.check(got, [0, 1, 3][:captured])
    with pytest.raises(ValueError, match="would drop rows"):
        call.meta.prepare(call.mapping, 4, captured)


def unique_consecutive(mapping: list[int]) -> tuple[list[int], list[int]]:
    """`unique` without the sort: a slot that comes back is a group of its own."""
    runs = [(slot, len(list(rows))) for slot, rows in groupby(mapping)]
    real = [(slot, count) for slot, count in runs if slot != NO_LORA]
    return [slot for slot, _ in real], [count for _, count in real]


def test_unsorted_unique() -> None:
    call = Call([0, 1, 0, 1])
    call.check(call.run())
    active, counts = unique_consecutive([0, 1, 0, 1])
    assert (active, counts) == ([0, 1, 0, 1], [1, 1, 1, 1])
    set_tables(call, active, counts, [0, 1, 2, 3])
    call.check(call.run(grid=4))  # right only with a grid that nobody counts with
    caught(call, call.run(grid=2), 2)


def test_unsorted_rows() -> None:
    """Groups in the order of first use beside rows sorted by slot: adapters are swapped."""
    call = Call([2, 0])
    for weights in (*call.a, *call.b):  # else the slots that have no rows are NaN
        weights.nan_to_num_(1.0)
    set_tables(call, [2, 0, -1, -1], [1, 1, 0, 0], [1, 0])
    caught(call, call.run(), 0)


# ---- offsets

Offset = Callable[[int, int], int]
MANY = [  # (what, row or slot, stride in elements)
    ("x, 2,049 rows of a wide buffer", 2048, 2**20),
    ("out, a long prefill of Llama-3.1-8B's gate and up", 80_000, 2 * 14336),
    ("A, slots of rank 256 and width 28,672", 300, 256 * 28672),
]


def offset_int32(row: int, stride: int) -> int:
    """``row * stride`` as a kernel computes it with 32-bit integers, which wrap."""
    with np.errstate(over="ignore"):
        return int(np.multiply(np.int32(row), np.int32(stride), dtype=np.int32))


def offset_int64(row: int, stride: int) -> int:
    return int(np.multiply(np.int64(row), np.int64(stride)))


@pytest.mark.parametrize(("what", "row", "stride"), MANY, ids=[name for name, *_ in MANY])
def test_32_bit_offsets(what: str, row: int, stride: int) -> None:
    """vLLM 53028: in range for each factor, out of range for the product (K1).

    That our kernels' products are 64-bit is measured on a GPU, in `test_triton_gpu.py`.
    """
    del what
    assert row < 2**31
    assert stride < 2**31
    assert offset_int64(row, stride) == row * stride
    wrapped = (row * stride + 2**31) % 2**32 - 2**31
    assert offset_int32(row, stride) == wrapped != row * stride


@pytest.mark.parametrize("offset", [offset_int32, offset_int64], ids=["int32", "int64"])
def test_32_bit_offsets_read_another_row(offset: Offset) -> None:
    """A buffer of 2^32 + 2 int8 elements that all but two pages of are never touched.

    Row 4,096 of 2^20 elements lies at 2^32, which wraps to 0: the value of row 0, no crash.
    """
    buffer = torch.empty(2**32 + 2, dtype=torch.int8)  # address space only
    buffer[:2], buffer[2**32 :] = 1, 2
    read = buffer[offset(4096, 2**20)].item()
    assert read == (1 if offset is offset_int32 else 2)
