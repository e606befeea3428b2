"""Decode attention in Triton against float64 and against the plain body.

As in `test_triton_kernels`: on a GPU they run as they are, on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from minilora.ops import scratch
from minilora.ops.triton import HAS_TRITON
from tests.test_attention import DTYPES
from tests.triton_attention_cases import MIXED, Case, interpreter, run_under_the_interpreter
from tests.triton_cases import DEVICE, INTERPRET, RUNS, kernels, pairwise

if HAS_TRITON:
    from minilora.ops.triton import decode_plan as plans
if RUNS:
    from minilora.ops.triton import decode as decode_module
    from minilora.ops.triton.decode import decode
    from minilora.ops.triton.store_kv import store_kv

GROUPS, WIDTHS, BLOCK_SIZES, SPLITS = [1, 2, 3, 4, 8], [6, 16, 64, 80, 128], [1, 16, 24], [1, 2, 5]


@interpreter
def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairwise_selection(dtype: torch.dtype) -> None:
    for group, width, block_size, splits in pairwise(
        9, GROUPS, WIDTHS, BLOCK_SIZES, SPLITS, seed=DTYPES.index(dtype)
    ):
        case = Case(MIXED, group, 1 if group > 2 else 2, width, block_size, dtype)
        got = case.run(splits)
        case.check(got)
        case.check_against_plain(got)


@kernels
@pytest.mark.parametrize("group", [1, 4])
def test_lengths_around_the_borders_of_tiles_and_shares(group: int) -> None:
    lens = sorted({0, *(n + d for n in (64, 128, 192, 256, 384) for d in (-1, 0, 1))})
    for splits in (1, 3):
        case = Case(lens, group, 1, columns=30)
        case.check(case.run(splits, longest=480))


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_as_many_splits_as_there_can_be(group: int) -> None:
    case = Case([2050, 3], group, 1, columns=9000 // 16)
    case.check(case.run(64))
    case.check(case.run(64, longest=9000))


@kernels
@pytest.mark.parametrize(("group", "kv_heads"), [(16, 1), (17, 2), (40, 1)])
def test_more_query_heads_than_one_program_takes(group: int, kv_heads: int) -> None:
    case = Case([5, 0, 70], group, kv_heads)
    for splits in (1, 2):
        case.check(case.run(splits))


@kernels
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("lens", [[0], [0, 0, 0], [0, 300, 0]], ids=str)
def test_padding_rows_get_zeros(lens: list[int], group: int) -> None:
    case = Case(lens, group)
    for splits in (1, 4):
        case.check(case.run(splits))
        case.check(case.run(splits, longest=1000))


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_the_bound_and_the_table_bound_what_is_read(group: int) -> None:
    """A stale length must not lead past the table: on a GPU that would be another's memory."""
    case = Case([100, 48], group)
    case.context_lens.fill_(2**31 - 1)
    case.lens = [100, 48]
    got = case.run(2, longest=48)
    case.lens, case.k = [48, 48], [k[:48] for k in case.k]
    case.v = [v[:48] for v in case.v]
    case.check(got)
    assert case.run(2, longest=10**6).shape == got.shape


@kernels
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("group", [1, 2])
def test_what_a_request_does_not_own_has_no_influence(poison: float, group: int) -> None:
    case = Case(MIXED, group, block_size=24)
    for cache in (case.k_cache, case.v_cache):
        cache[cache.isnan()] = poison
    case.check(case.run(3))


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_a_row_does_not_depend_on_the_others(group: int) -> None:
    """Not a bit, if the launch is the same; a NaN spoils its own row only."""
    case = Case([300, 40, 170], group)
    want = case.run(3)
    for cache in (case.k_cache, case.v_cache):
        cache.flatten(0, 1)[case.slots[1]] = torch.nan
    got = case.run(3)
    assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all()


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_scratch_memory_may_hold_anything(group: int) -> None:
    case = Case(MIXED, group)
    for splits in (1, 3):
        want = case.run(splits)
        with scratch.filled():
            assert torch.equal(case.run(splits), want)


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_repeats_are_bit_identical(group: int) -> None:
    case = Case(MIXED, group, width=64, dtype=torch.float16)
    want = case.run(4)
    for _ in range(50 if DEVICE == "cuda" else 2):
        assert torch.equal(case.run(4), want)


@kernels
@pytest.mark.parametrize("group", [1, 2])
def test_only_contexts_of_several_shares_are_merged(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of one share is final before the second kernel, so it pays for no merge."""
    case = Case([0, 128, 1, 129], group)
    case.check(case.run(8))
    monkeypatch.setattr(decode_module, "_merge", lambda *arguments: None)
    with scratch.filled():
        got = case.run(8)
    assert got[3].isnan().all()
    case.lens, got = [0, 128, 1], got[:3]
    case.q = case.q[:3]
    case.check(got)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2])
def test_large_scores_do_not_overflow(dtype: torch.dtype, group: int) -> None:
    case = Case([300, 5], group, dtype=dtype)
    case.scale = 200.0
    assert case.run(2).isfinite().all()


@kernels
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_a_cache_of_another_dtype_than_the_queries(cache_dtype: torch.dtype, group: int) -> None:
    for dtype in (torch.float32, torch.float16):
        case = Case(MIXED, group, dtype=dtype, cache_dtype=cache_dtype)
        case.check(case.run(2))


@kernels
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("layout", ["part of longer blocks", "heads first", "part of a width"])
def test_strided_caches(layout: str, group: int) -> None:
    case = Case([20, 0, 5], group, block_size=4)
    blocks, size, heads, width = case.k_cache.shape
    for name in ("k_cache", "v_cache"):  # then the two are laid out differently
        cache = getattr(case, name)
        if layout == "part of longer blocks":
            wide = cache.new_full((blocks, 2 * size, heads, width), torch.nan)[:, :size]
        elif layout == "heads first":
            wide = cache.new_full((blocks, heads, size, width), torch.nan).transpose(1, 2)
        else:
            wide = cache.new_full((blocks, size, heads, width + 8), torch.nan)[..., :width]
        setattr(case, name, wide.copy_(cache))
        case.check(case.run(2))


@kernels
def test_offsets_beyond_2_to_the_31() -> None:
    """The pool has 2^31 elements and a little; only what is written takes memory on a CPU."""
    width, size = 64, 16
    blocks = 2**31 // (width * size) + 9
    pool = torch.empty(blocks, size, 1, width, dtype=torch.float16, device=DEVICE)
    for group in (1, 2):
        case = Case([40], group, 1, width, size, torch.float16)
        last = torch.arange(blocks - 3, blocks, device=DEVICE)
        slots = torch.arange((blocks - 3) * size, (blocks - 3) * size + 40, device=DEVICE)
        case.block_tables[0, :3] = last.int()
        store_kv(case.k[0], case.k[0], pool, pool, slots.int())
        case.k_cache = case.v_cache = pool
        case.v = case.k
        case.check(case.run(1))


@kernels
def test_what_is_refused_and_what_is_nothing() -> None:
    case = Case([5, 0])
    for flat in (case.k_cache, case.v_cache):
        apart = flat.transpose(-1, -2).contiguous().transpose(-1, -2)
        for caches in ((apart, case.v_cache), (case.k_cache, apart)):
            with pytest.raises(ValueError, match="last must be 1"):
                decode(case.q, *caches, case.block_tables, case.context_lens, 5, 1.0)
    for q in (case.q[:, :3], case.q[..., :8]):
        with pytest.raises(ValueError, match="heads of width"):
            decode(q, *case.tensors[1:], 5, 1.0)
    no_rows = decode(
        case.q[:0], *case.tensors[1:3], case.block_tables[:0], case.context_lens[:0], 5, 1
    )
    assert no_rows.shape == (0, 4, 16)
    assert torch.equal(case.run(longest=0), torch.zeros_like(case.q))


@kernels
def test_the_plan_depends_on_the_bound_in_its_splits_only() -> None:
    """So that no number of rows, and no context, compiles a kernel anew."""
    kinds, cache = set(), torch.empty(9, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 2, 7, 64, 300):
        q = torch.empty(rows, 32, 128, dtype=torch.bfloat16, device=DEVICE)
        for bound in (0, 1, 160, 4096, 32768):
            tables = torch.empty(rows, 4096, dtype=torch.int32, device=DEVICE)
            plan = plans.decode_plan(q, cache, tables, bound)
            assert 1 <= plan.splits <= plans.MOST_SPLITS
            assert plan.longest == bound
            kinds.add(plan._replace(splits=0, longest=0))
    assert len(kinds) == 1


@pytest.mark.skipif(not HAS_TRITON, reason="the plan is made beside Triton")
def test_few_rows_are_split_and_many_are_not() -> None:
    assert plans.splits_of(8, 32768, 64, fill=264) == 33
    assert plans.splits_of(8, 160, 64, fill=264) == 2  # no more than shares of two tiles
    assert plans.splits_of(256, 4096, 64, fill=264) == 1
    assert plans.splits_of(256, 32768, 64, fill=264) == 4  # nobody is left alone with 32768
    assert plans.splits_of(1, 10**6, 64, fill=10**4) == plans.MOST_SPLITS
    assert plans.splits_of(0, 0, 64, fill=264) == 1


@pytest.mark.skipif(not HAS_TRITON or INTERPRET, reason="compiles, which the interpreter cannot")
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("splits", [1, 2])
def test_it_compiles_for_hopper_and_pipelines_its_loads(group: int, splits: int) -> None:
    """No GPU needed. The interpreter takes code that the compiler refuses."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minilora.ops.triton.decode import _decode_kernel

    names, form = _decode_kernel.arg_names, plans.ONE if group == 1 else plans.GROUP
    constants = {"D": 128, "G": group, "PARTS": 1, "BLOCK_SIZE": 16, "BLOCK_D": 128, "LEAST": 2}
    constants |= {"BLOCK_G": 1 if group == 1 else 16, "BLOCK_N": form.tile_bytes // 256}
    constants |= {"STAGES": form.stages, "MANY": splits > 1, "EARLY": True, "EXACT": False}
    kinds = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("sums", "stats"), "*fp32" if splits > 1 else "*bf16")
    kinds |= dict.fromkeys(("tables", "context_lens"), "*i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = {name for name in names if name[:2] in ("q", "q_", "k_", "v_")}
    source = ASTSource(
        fn=_decode_kernel,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm[
        "ptx"
    ]
    assert "cp.async.cg.shared.global [ %r" in ptx  # 16 bytes at a time
    assert ("mma.sync" in ptx) == (group > 1)
    assert "wgmma" not in ptx  # with 16 rows; its left operand must not come from registers
