"""The attention kernels where only a GPU shows it: graphs, long contexts, early launches."""

from __future__ import annotations

import random

import pytest
import torch

from minilora.ops.attention import decode_attention, store_kv
from tests.test_attention import DTYPES
from tests.triton_attention_cases import MIXED, Case
from tests.triton_cases import DEVICE, RUNS, pairwise

if RUNS:
    from minilora.ops.triton.decode import _decode_kernel, _merge_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RUNS or DEVICE != "cuda", reason="needs a CUDA device and Triton"),
]

HEADS = [(1, 32), (4, 8), (8, 1), (2, 3), (7, 4)]  # query heads of a KV head, and KV heads
BATCHES = [(4096,), (0, 1, 5000, 16), tuple(MIXED * 6), (700,) * 64, (33000, 0, 7)]
WIDTHS, BLOCK_SIZES, SPLITS = [64, 80, 128, 256], [1, 16, 24], [None, 1, 7, 64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts_and_full_batches(dtype: torch.dtype) -> None:
    seed = DTYPES.index(dtype)
    for lens, heads, width, size, splits in pairwise(
        10, BATCHES, HEADS, WIDTHS, BLOCK_SIZES, SPLITS, seed=seed
    ):
        case = Case(lens, *heads, width, size, dtype)
        case.check(case.run(splits))


def decode_op(case: Case, longest: int) -> torch.Tensor:
    got: torch.Tensor = decode_attention(*case.tensors, longest, case.scale)
    return got


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_graph_replays_on_new_contexts(rows: int, group: int) -> None:
    cases = [
        Case(lens, group, 4, 64, dtype=torch.bfloat16, columns=256)
        for lens in (
            [4096] * rows,
            [0] * rows,
            [16] * rows,
            random.Random(1).choices(MIXED, k=rows),
        )
    ]
    static = cases[0]
    decode_op(static, 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_op(static, 4096)
    pool = static.k_cache, static.v_cache
    for case in cases:
        for mine, theirs in zip(pool, (case.k_cache, case.v_cache), strict=True):
            mine[: case.num_blocks] = theirs
        for mine, theirs in zip(
            (static.q, static.block_tables, static.context_lens),
            (case.q, case.block_tables, case.context_lens),
            strict=True,
        ):
            mine.copy_(theirs)
        out.fill_(torch.nan)
        graph.replay()
        case.check(out)
        assert torch.equal(out, decode_op(case, 4096))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("rows", [2, 64])
def test_what_the_operation_before_wrote_is_read(rows: int, group: int) -> None:
    """Early launches must not read the caches, lengths or shares before they are complete."""
    case = Case([300, 2000] * (rows // 2), group, 8, 128, dtype=torch.bfloat16)
    k, v = (torch.stack([x[-1] for x in new]) for new in (case.k, case.v))
    last = torch.stack([slots[-1] for slots in case.slots]).int()
    lens, zeros = case.context_lens.clone(), torch.zeros_like(k)
    want = decode_op(case, 2000)
    case.check(want)
    for _ in range(100):
        store_kv(zeros, zeros, case.k_cache, case.v_cache, last)
        case.context_lens.zero_()
        assert not decode_op(case, 2000).any()
        torch.add(lens, 0, out=case.context_lens)
        store_kv(k, v, case.k_cache, case.v_cache, last)
        assert torch.equal(decode_op(case, 2000), want)


def test_nothing_is_compiled_after_warm_up() -> None:
    """One call with one share and one with many make every kernel of a model."""

    def compiled() -> int:
        caches = (_decode_kernel.device_caches, _merge_kernel.device_caches)
        return sum(len(cache[0]) for kernel in caches for cache in kernel.values())

    def step(lens: list[int], longest: int, columns: int) -> None:
        decode_op(Case(lens, 4, 2, 96, dtype=torch.float16, columns=columns), longest)

    step([1], 1, 1)
    step([1], 4096, 256)
    before = compiled()
    for rows in (1, 2, 3, 8, 16, 17, 64, 300):
        for longest, columns in ((1, 1), (16, 1), (17, 2), (1000, 63), (4096, 256), (32768, 2048)):
            step([min(longest, 40)] * rows, longest, columns)
    assert compiled() == before
    assert before > 0


def test_the_op_compiles_and_gives_the_same_bits() -> None:
    case = Case(MIXED, 4, 2, 64, dtype=torch.bfloat16)
    want = case.run(longest=512)
    assert torch.equal(decode_op(case, 512), want)
    k, v = case.q[:, :2], case.q[:, 2:4]
    slots = torch.zeros(len(MIXED), dtype=torch.int32, device=DEVICE)

    def step(q: torch.Tensor) -> torch.Tensor:
        store_kv(k, v, case.k_cache, case.v_cache, slots)
        got: torch.Tensor = decode_attention(q, *case.tensors[1:], 512, case.scale)
        return got

    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    assert torch.equal(compiled(case.q), want)


def test_opcheck() -> None:
    case = Case([5, 0, 40], 4, 2, 64)
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(0.0)
    q = case.q.contiguous()
    ops, caches = torch.ops.minilora, (case.k_cache, case.v_cache)
    arguments = (q, *case.tensors[1:], 40, case.scale)
    torch.library.opcheck(ops.decode_attention.default, arguments)
    slots = torch.tensor([17, 0, 18], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(ops.store_kv.default, (q[:, :2], q[:, 2:4], *caches, slots))
