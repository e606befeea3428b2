"""Paged attention against a loop in float64, one row and one head at a time.

A cache starts full of NaN: whatever a request does not own must have no influence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from minilora.ops.attention import decode_attention, prefill_attention, store_kv
from minilora.testing import check_replay

# The softmax's weights are rounded once to the dtype, and the output once more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


@dataclass
class Paged:
    """A pool of blocks, and contexts of some lengths in scattered blocks of it.

    `q` ``[Hq, D]``, `k` and `v` ``[Hkv, D]`` of every token of every request are kept outside
    of the pool too, in order, for the reference.
    """

    context_lens: Sequence[int]
    group: int = 2
    kv_heads: int = 2
    width: int = 6
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    spare_columns: int = 0
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        self.scale = self.width**-0.5
        heads = self.group * self.kv_heads

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen).to(self.dtype)

        self.q = [normal(n, heads, self.width) for n in self.context_lens]
        self.k = [normal(n, self.kv_heads, self.width) for n in self.context_lens]
        self.v = [normal(n, self.kv_heads, self.width) for n in self.context_lens]
        self._place_blocks()
        self._fill()

    def _place_blocks(self) -> None:
        """Hand out blocks 1, 2, ... in random order; block 0 is nobody's."""
        needed = [-(-n // self.block_size) for n in self.context_lens]
        free = list(range(1, sum(needed) + 3))
        random.Random(self.seed).shuffle(free)
        columns = max(needed, default=0) + self.spare_columns
        self.num_blocks = sum(needed) + 3
        self.tables = torch.zeros(len(needed), columns, dtype=torch.int32)
        for request, count in enumerate(needed):
            for column in range(count):
                self.tables[request, column] = free.pop()

    def _fill(self) -> None:
        shape = (self.num_blocks, self.block_size, self.kv_heads, self.width)
        self.k_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        self.v_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        for request, n in enumerate(self.context_lens):
            for position in range(n):
                block = self.tables[request, position // self.block_size]
                offset = position % self.block_size
                self.k_cache[block, offset] = self.k[request][position]
                self.v_cache[block, offset] = self.v[request][position]

    @property
    def lens(self) -> torch.Tensor:
        return torch.tensor(self.context_lens, dtype=torch.int32)

    def expected(self, request: int, position: int) -> torch.Tensor:
        """What the token at `position` gets, ``[Hq, D]`` in float64."""
        rows = []
        for head in range(self.group * self.kv_heads):
            q = self.q[request][position, head].double()
            k = self.k[request][: position + 1, head // self.group].double()
            v = self.v[request][: position + 1, head // self.group].double()
            scores = [float(q @ key) * self.scale for key in k]
            weights = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(w * value for w, value in zip(weights, v, strict=True))
            rows.append(mixed / sum(weights))
        return torch.stack(rows)

    def decode(self, max_context_len: int | None = None) -> torch.Tensor:
        """Attend from the last token of each request; a padding row's query is 1."""
        longest = max(self.context_lens) if max_context_len is None else max_context_len
        ones = torch.ones(self.group * self.kv_heads, self.width, dtype=self.dtype)
        q = torch.stack([q[-1] if len(q) else ones for q in self.q])
        caches = self.k_cache, self.v_cache
        out: torch.Tensor = decode_attention(
            q, *caches, self.tables, self.lens, longest, self.scale
        )
        return out

    def prefill(self, spans: Sequence[tuple[int, int]], device: str = "cpu") -> torch.Tensor:
        """Attend from the tokens ``start <= position < stop`` of each request."""
        q = torch.cat([q[a:b] for q, (a, b) in zip(self.q, spans, strict=True)])
        lengths = [b - a for a, b in spans], [b for _, b in spans]
        there = (t.to(device) for t in (q, self.k_cache, self.v_cache, self.tables))
        return prefill_attention(*there, *lengths, self.scale).cpu()

    def check_decode(self, got: torch.Tensor) -> None:
        for request, n in enumerate(self.context_lens):
            if n == 0:
                assert torch.equal(got[request], torch.zeros_like(got[request]))
            else:
                self.check_row(got[request], request, n - 1)

    def check_prefill(self, got: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        rows = [(r, p) for r, (a, b) in enumerate(spans) for p in range(a, b)]
        assert got.shape[0] == len(rows)
        for row, (request, position) in zip(got, rows, strict=True):
            self.check_row(row, request, position)

    def check_row(self, got: torch.Tensor, request: int, position: int) -> None:
        want = self.expected(request, position)
        error = (got.double() - want).abs().max()
        limit = TOLERANCE[self.dtype] * self.v[request].double().abs().max()
        assert error <= limit, f"request {request}, position {position}: off by {error:.2g}"


GROUPS = [1, 2, 3, 4]
LENGTHS = [5, 1, 4, 8, 9, 3]  # with block_size 4: in, at and over a block border


# ---- decode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_decode(dtype: torch.dtype, group: int, kv_heads: int) -> None:
    paged = Paged(LENGTHS, group, kv_heads, dtype=dtype)
    paged.check_decode(paged.decode())


@pytest.mark.parametrize("width", [2, 6, 10, 16, 64, 80])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_decode_sizes(width: int, block_size: int) -> None:
    paged = Paged([1, 2, 3, 15, 16, 17, 33], 3, 2, width, block_size)
    paged.check_decode(paged.decode())


@pytest.mark.parametrize("lens", [[1], [0], [0, 0], [0, 5, 0], [5, 0, 0], [4, 4, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_of_padding_rows(lens: list[int], dtype: torch.dtype) -> None:
    """They have length 0 and block 0, which holds NaN, and get exact zeros."""
    paged = Paged(lens, dtype=dtype, spare_columns=1)
    paged.check_decode(paged.decode())
    paged.check_decode(paged.decode(max_context_len=8))


def test_decode_with_a_longer_bound_and_a_wider_table() -> None:
    """In a graph the bound is that of any replay, and the table as wide as any request."""
    paged = Paged(LENGTHS, spare_columns=5)
    for longest in (9, 10, 12, 13, 32, 1000):
        paged.check_decode(paged.decode(longest))


def test_decode_ignores_what_a_table_says_beyond_a_context() -> None:
    paged = Paged([3, 12], spare_columns=2)
    own = int(paged.tables[1, 0])
    paged.tables[0, 1:] = own  # another request's block
    paged.check_decode(paged.decode())
    paged.tables[0, 1:] = paged.num_blocks - 1  # the last block of the pool
    paged.check_decode(paged.decode())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_decode_ignores_what_it_does_not_own(poison: float) -> None:
    paged = Paged(LENGTHS)
    for cache in (paged.k_cache, paged.v_cache):
        cache[cache.isnan()] = poison
    paged.check_decode(paged.decode())


def test_decode_rows_are_independent() -> None:
    """A request that is NaN itself spoils nobody else."""
    paged = Paged(LENGTHS)
    own = paged.tables[1, :1].long()
    paged.k_cache[own] = paged.v_cache[own] = torch.nan
    got = paged.decode()
    assert bool(got[1].isnan().any())
    paged.context_lens = [5, 0, 4, 8, 9, 3]
    got[1] = 0
    paged.check_decode(got)


def test_large_scores_do_not_overflow() -> None:
    for dtype in DTYPES:
        paged = Paged([9, 5], dtype=dtype)
        paged.scale = 200.0
        got = paged.decode()
        assert bool(got.isfinite().all())
        if dtype == torch.float32:  # a softmax this sharp is a choice that halves cannot repeat
            paged.check_decode(got)


def test_scale_is_applied() -> None:
    paged = Paged(LENGTHS)
    paged.scale = 0.7
    paged.check_decode(paged.decode())
    paged.check_prefill(paged.prefill([(0, n) for n in LENGTHS]), [(0, n) for n in LENGTHS])


# ---- prefill


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_prefill(device: str, dtype: torch.dtype, group: int, kv_heads: int) -> None:
    paged = Paged(LENGTHS, group, kv_heads, dtype=dtype)
    for spans in ([(0, n) for n in LENGTHS], [(n // 2, n) for n in LENGTHS]):
        paged.check_prefill(paged.prefill(spans, device), spans)


@pytest.mark.parametrize("width", [2, 6, 10, 16, 64, 80])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prefill_sizes(device: str, width: int, block_size: int) -> None:
    paged = Paged([1, 2, 17, 33], 3, 2, width, block_size)
    spans = [(0, 1), (1, 2), (5, 17), (0, 33)]
    paged.check_prefill(paged.prefill(spans, device), spans)


def test_every_chunk_of_a_prompt() -> None:
    """Chunked prefill equals whole: each chunk sees all before it, and nothing after."""
    n = 10
    paged = Paged([n])
    whole = paged.prefill([(0, n)])
    paged.check_prefill(whole, [(0, n)])
    for start in range(n):
        for stop in range(start + 1, n + 1):
            chunk = paged.prefill([(start, stop)])
            torch.testing.assert_close(chunk, whole[start:stop], rtol=0, atol=1e-6)


def test_a_chunk_reads_nothing_after_it() -> None:
    """Later tokens are not in the cache yet; there is NaN, also in the chunk's last block."""
    paged = Paged([10])
    flat_k, flat_v = paged.k_cache.flatten(0, 1), paged.v_cache.flatten(0, 1)
    for stop in range(9, 0, -1):
        slot = int(paged.tables[0, stop // 4]) * 4 + stop % 4
        flat_k[slot] = flat_v[slot] = torch.nan
        for start in range(stop):
            paged.check_prefill(paged.prefill([(start, stop)]), [(start, stop)])


def test_chunks_of_several_requests_in_one_call() -> None:
    paged = Paged([12, 7, 1, 9], spare_columns=3)
    spans = [(5, 11), (0, 7), (0, 1), (8, 9)]
    paged.check_prefill(paged.prefill(spans), spans)


def test_the_last_row_of_a_prefill_is_a_decode() -> None:
    paged = Paged(LENGTHS, group=3)
    last = [(n - 1, n) for n in LENGTHS]
    torch.testing.assert_close(paged.prefill(last), paged.decode(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rows", "lens"), [(3, [4]), (9, [4]), (3, [2, 2]), (0, [1])])
def test_prefill_of_other_rows_than_the_lengths_say(rows: int, lens: list[int]) -> None:
    """Fewer rows would be taken for later positions, and more would stay uninitialised (K6)."""
    paged = Paged([4, 4])
    q = torch.ones(rows, 4, 6)
    caches = paged.k_cache, paged.v_cache
    with pytest.raises(ValueError, match=f"{rows} rows.*{sum(lens)}"):
        prefill_attention(q, *caches, paged.tables, lens, [4] * len(lens), 1.0)


def test_prefill_lengths_that_do_not_go_together() -> None:
    paged = Paged([4, 4])
    caches = paged.k_cache, paged.v_cache
    for lens, contexts, fault in [
        ([3], [4], "got 4 rows, but query_lens describe 3"),
        ([4], [3], "4 new tokens in a context of 3"),
        ([4], [4, 4], "longer than argument"),
    ]:
        with pytest.raises(ValueError, match=fault):
            prefill_attention(torch.ones(4, 4, 6), *caches, paged.tables, lens, contexts, 1.0)


def test_a_chunk_is_the_same_in_a_recorded_graph() -> None:
    """Its mask is a subclass of a tensor, which a recorder must not read as a plain one."""
    paged = Paged([9])
    static = {"k": paged.k_cache, "v": paged.v_cache, "tables": paged.tables}
    q = torch.cat([q[4:] for q in paged.q])

    def attend() -> torch.Tensor:
        return prefill_attention(q, *static.values(), [5], [9], paged.scale)

    checked = check_replay(attend, {"q": q}, [{"q": q.clone()}, {"q": q + 1}], state=static)
    assert checked == 6


# ---- both


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_of_another_dtype_than_the_queries(dtype: torch.dtype) -> None:
    paged = Paged(LENGTHS, dtype=dtype)
    paged.q = [q.float() for q in paged.q]
    spans = [(0, n) for n in LENGTHS]
    got, decoded = paged.prefill(spans), decode_in_float32(paged)
    assert got.dtype == decoded.dtype == torch.float32
    paged.dtype = torch.float32
    paged.check_prefill(got, spans)
    paged.check_decode(decoded)


def decode_in_float32(paged: Paged) -> torch.Tensor:
    q = torch.stack([q[-1] for q in paged.q])
    caches = paged.k_cache, paged.v_cache
    longest = max(LENGTHS)
    out: torch.Tensor = decode_attention(q, *caches, paged.tables, paged.lens, longest, paged.scale)
    return out


def test_queries_that_are_a_slice_of_a_wider_buffer() -> None:
    """As the model has them: the q part of one row of q, k and v."""
    paged = Paged(LENGTHS)
    wide = [torch.full((len(q), 4 + 5, 6), torch.nan) for q in paged.q]
    for q, buffer in zip(paged.q, wide, strict=True):
        buffer[:, 2:6] = q
    spans = [(0, n) for n in LENGTHS]
    lengths = LENGTHS, LENGTHS
    caches = paged.k_cache, paged.v_cache
    q = torch.cat(wide)[:, 2:6]
    paged.check_prefill(prefill_attention(q, *caches, paged.tables, *lengths, paged.scale), spans)
    last = torch.stack([buffer[-1] for buffer in wide])[:, 2:6]
    decoded = decode_attention(last, *caches, paged.tables, paged.lens, 9, paged.scale)
    paged.check_decode(decoded)


def test_attention_writes_nothing() -> None:
    paged = Paged(LENGTHS)
    for cache in (paged.k_cache, paged.v_cache):
        cache.nan_to_num_(7.0)
    inputs = [paged.k_cache, paged.v_cache, paged.tables, *paged.q]
    before = [x.clone() for x in inputs]
    paged.decode()
    paged.prefill([(0, n) for n in LENGTHS])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_no_rows_at_all() -> None:
    paged = Paged([4])
    caches = paged.k_cache, paged.v_cache
    empty = torch.zeros(0, dtype=torch.int32)
    got = decode_attention(torch.ones(0, 4, 6), *caches, paged.tables[:0], empty, 0, 1.0)
    assert got.shape == (0, 4, 6)


# ---- store_kv


def new_kv(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(9)
    k = torch.randn(rows, 2, 6, generator=gen).to(dtype)
    return k, torch.randn(rows, 2, 6, generator=gen).to(dtype)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_store_kv_writes_its_slots_and_nothing_else(cache_dtype: torch.dtype) -> None:
    k, v = new_kv(4)
    caches = [torch.full((5, 4, 2, 6), 3.0, dtype=cache_dtype) for _ in range(2)]
    slots = torch.tensor([19, 4, 7, 8], dtype=torch.int32)
    store_kv(k, v, *caches, slots)
    for new, cache in zip((k, v), caches, strict=True):
        for row, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // 4, slot % 4], new[row].to(cache_dtype))
            cache[slot // 4, slot % 4] = 3.0
        assert bool((cache == 3.0).all())


def test_padding_rows_write_to_block_zero_only() -> None:
    """G2: a -1 would be the last slot of the pool, which may be somebody's."""
    k, v = new_kv(4)
    caches = [torch.full((3, 4, 2, 6), 3.0) for _ in range(2)]
    store_kv(k, v, *caches, torch.tensor([5, 0, 0, 0]))
    for new, cache in zip((k, v), caches, strict=True):
        assert torch.equal(cache[1, 1], new[0])
        assert any(torch.equal(cache[0, 0], row) for row in new[1:])
        cache[1, 1] = cache[0, 0] = 3.0
        assert bool((cache == 3.0).all())


@pytest.mark.parametrize("slot", [-1, 12, 1 << 30])
def test_a_slot_outside_of_the_pool_is_refused(slot: int) -> None:
    k, v = new_kv(1)
    caches = [torch.full((3, 4, 2, 6), 3.0) for _ in range(2)]
    with pytest.raises((IndexError, RuntimeError)):
        store_kv(k, v, *caches, torch.tensor([slot]))


def test_rows_and_slots_of_other_numbers_are_refused() -> None:
    k, v = new_kv(3)
    caches = [torch.full((3, 4, 2, 6), 3.0) for _ in range(2)]
    with pytest.raises((IndexError, RuntimeError)):
        store_kv(k, v, *caches, torch.tensor([4, 5]))


def test_keys_that_are_a_slice_of_a_wider_buffer() -> None:
    qkv = torch.randn(3, 8, 6)
    caches = [torch.zeros(3, 4, 2, 6) for _ in range(2)]
    store_kv(qkv[:, 4:6], qkv[:, 6:], *caches, torch.tensor([4, 6, 11]))
    for cache, first in zip(caches, (4, 6), strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[4, 6, 11]], qkv[:, first : first + 2])


@pytest.mark.parametrize("layout", ["part of longer blocks", "heads first", "part of a width"])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_strided_cache_is_written_or_refused(layout: str, which: str) -> None:
    """Never a copy that is written instead of the cache, and thrown away."""
    k, v = new_kv(1)
    k_cache, v_cache = torch.zeros(3, 4, 2, 6), strided_cache(layout)
    if which == "keys":
        k_cache, v_cache = v_cache, k_cache
    try:
        store_kv(k, v, k_cache, v_cache, torch.tensor([6]))
    except (RuntimeError, ValueError):
        return
    assert torch.equal(k_cache[1, 2], k[0])
    assert torch.equal(v_cache[1, 2], v[0])


def strided_cache(layout: str) -> torch.Tensor:
    if layout == "part of longer blocks":
        return torch.zeros(3, 8, 2, 6)[:, :4]
    if layout == "heads first":
        return torch.zeros(3, 2, 4, 6).transpose(1, 2)
    return torch.zeros(3, 4, 2, 9)[..., :6]


# ---- torch.library


def test_opcheck_store_kv() -> None:
    k, v = new_kv(2)
    caches = [torch.zeros(3, 4, 2, 6) for _ in range(2)]
    slots = torch.tensor([5, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.minilora.store_kv.default, (k, v, *caches, slots))


@pytest.mark.parametrize("sliced", [False, True])
def test_opcheck_decode(sliced: bool) -> None:
    paged = Paged([5, 0, 4])
    q = torch.ones(3, 9, 6)[:, 2:6] if sliced else torch.ones(3, 4, 6)
    caches = [cache.nan_to_num(0.0) for cache in (paged.k_cache, paged.v_cache)]
    args = (q, *caches, paged.tables, paged.lens, 5, 0.4)
    torch.library.opcheck(torch.ops.minilora.decode_attention.default, args)


@pytest.mark.parametrize("sliced", [False, True])
def test_opcheck_prefill(sliced: bool) -> None:
    paged = Paged([5, 4])
    q = torch.ones(6, 9, 6)[:, 2:6] if sliced else torch.ones(6, 4, 6)
    caches = [cache.nan_to_num(0.0) for cache in (paged.k_cache, paged.v_cache)]
    args = (q, *caches, paged.tables, [2, 4], [5, 4], 0.4)
    torch.library.opcheck(torch.ops.minilora.prefill_attention.default, args)
