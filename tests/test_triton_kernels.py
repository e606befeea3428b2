"""The Triton kernels, against a float64 loop.

On a GPU they run as they are; on a CPU under Triton's interpreter, which has to be switched on
before triton is first imported: `test_under_the_interpreter` starts pytest on this file again
with ``TRITON_INTERPRET=1``. Without Triton there is nothing to test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minilora.ops.triton import HAS_TRITON
from tests.triton_cases import (
    CUDA,
    DEVICE,
    INTERPRET,
    RANKS,
    RUNS,
    TOLERANCE,
    Case,
    kernels,
    mapping_of,
    pairwise,
)

if RUNS:
    from minilora.ops.triton import launch
    from minilora.ops.triton.expand import expand
    from minilora.ops.triton.shrink import shrink
    from minilora.ops.triton.shrink_atomic import shrink_atomic


@pytest.mark.skipif(not HAS_TRITON or CUDA or INTERPRET, reason="runs on a CPU with Triton")
def test_under_the_interpreter() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", __file__],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


CPU_ROWS, CPU_WIDTHS = [1, 2, 8, 9, 17, 33, 65], [1, 33, 172, 512]
CPU_OUTS = [(40,), (1, 33), (64, 16, 17)]
SLOTS = [(0,), (-1, 3), (-1, 0, 2, 5), (7, 6, 5, 4, 3, 2, 1, 0)]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pairwise_selection(dtype: torch.dtype) -> None:
    for rank in RANKS:  # every rank, whatever else the selection picks
        Case(mapping_of(5, (0, 2, -1), rank), rank=rank, dtype=dtype).check()
    for rows, width, outs, rank, slots in pairwise(
        36, CPU_ROWS, CPU_WIDTHS, CPU_OUTS, RANKS, SLOTS
    ):
        Case(mapping_of(rows, slots, rows), width, outs, rank, 8, dtype=dtype).check()


@kernels
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixed_ranks_leave_out_what_lies_past_them(rows: int, dtype: torch.dtype) -> None:
    ranks = [20, 0, 3, 16]
    mapping = [*mapping_of(rows - 3, (-1, 0, 1, 2, 3)), 0, 1, 2]
    Case(mapping, outs=(33, 17, 40), rank=20, ranks=ranks, dtype=dtype).check()
    Case(mapping, rank=64, ranks=[64, 8, 0, 17], dtype=dtype).check()


@kernels
@pytest.mark.parametrize(
    "mapping",
    [[-1] * 4, [-1, -1, 1], [1, -1, -1], [1, -1, 2, -1, 1], [3], [0] * 12, [3, 0] * 9],
    ids=str,
)
def test_rows_without_adapter_are_untouched(mapping: list[int]) -> None:
    Case(mapping).check()


@kernels
def test_k3_widths_outside_of_any_list() -> None:
    """vLLM 3793, 5441; Punica 23."""
    for width, out, rows in pairwise(8, [48, 80, 344, 1000], [40, 172], [1, 15, 16, 33], seed=1):
        Case(mapping_of(rows, (0, 1, -1)), width, (out,)).check()


@kernels
@pytest.mark.parametrize("rows", [4, 21])
def test_strides_between_rows(rows: int) -> None:
    """TensorRT-LLM 17153: a slice of a wider buffer, and guard columns beside it."""
    case = Case(mapping_of(rows, (0, -1, 2)), width=96, outs=(24, 16))
    want = case.run()
    wide = torch.full((rows, 200), torch.nan, device=DEVICE)
    wide[:, 7:103], case.x = case.x, wide[:, 7:103]
    buffer = torch.full((rows, 50), 7.0, device=DEVICE)
    out = buffer[:, 5:45]
    out.copy_(case.out)
    case.expand(case.shrink(), out)
    assert torch.equal(out, want)
    assert (buffer[:, :5] == 7).all()
    assert (buffer[:, 45:] == 7).all()
    case.x = case.x.t().contiguous().t()  # columns apart
    assert torch.equal(case.run(), want)


@kernels
@pytest.mark.parametrize("rows", [8, 30])
def test_h_may_hold_anything_before(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mapping_of(rows, (0, 1, -1)), width=1030, rank=20, ranks=[20, 3, 0, 0])
    want, empty = case.run(), torch.empty
    monkeypatch.setattr(
        launch.torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)
    )
    assert torch.equal(case.run(), want)
    assert case.error(want) < TOLERANCE[torch.float32]


@kernels
@pytest.mark.parametrize("rows", [8, 30])
def test_k4_repeats_are_bit_identical(rows: int) -> None:
    case = Case(mapping_of(rows, (0, 1, -1)), width=2100, dtype=torch.float16)
    want = case.run()
    for _ in range(50 if DEVICE == "cuda" else 2):
        assert torch.equal(case.run(), want)


@kernels
@pytest.mark.parametrize("rows", [6, 24])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    """Same launch (rows, groups): same bits, whatever the other rows hold, NaN included."""
    case = Case([0, 2, *mapping_of(rows - 2, (0, 2, -1))], width=700)
    want = case.run()[0].clone()
    other = Case([0, 2, *mapping_of(rows - 2, (2, -1), seed=5)], width=700)
    case.meta, case.mapping = other.meta, other.mapping
    case.x[1:], case.out[1:] = torch.nan, torch.nan
    case.a[0][2], case.b[0][2] = torch.nan, torch.nan
    assert torch.equal(case.run()[0], want)


@kernels
@pytest.mark.parametrize("rows", [4, 20])
def test_the_grid_is_what_the_count_says(rows: int) -> None:
    mapping = [1, 3] * (rows // 2)
    exact = Case(mapping)
    for groups in (3, 4, 9):  # more than the real groups: the rest exit
        wide = Case(mapping, groups=groups)
        assert wide.error(wide.run()) < TOLERANCE[torch.float32]
    exact.active = 1  # a stale count: the last adapter is dropped, as in vLLM 0.24's V1 runner
    got = exact.run()
    assert torch.equal(got[1::2], exact.out[1::2])
    assert exact.error(got) > 0.1
    exact.active = 0
    assert torch.equal(exact.run(), exact.out)


@kernels
def test_broken_tables_give_wrong_values() -> None:
    case = Case([1, 3, -1] * 6)
    assert case.error(case.run()) < TOLERANCE[torch.float32]
    order = case.meta.token_indices_sorted_by_lora_ids
    good = order.clone()
    order.copy_(torch.arange(18, device=DEVICE))  # not sorted
    assert case.error(case.run()) > 0.1
    order.copy_(good)
    # -1 counted as a group, and listed first: the last real adapter falls off the grid.
    case.meta.active_lora_ids.copy_(torch.tensor([-1, 1, 3, -1]))
    case.meta.num_tokens_per_lora.copy_(torch.tensor([6, 6, 6, 0]))
    order.copy_(torch.cat([good[12:], good[:12]]))
    assert case.error(case.run()) > 0.1


@kernels
def test_the_atomic_variant_needs_its_reset() -> None:
    case = Case([1, 3, -1, 1], width=600, outs=(40, 24))
    h = shrink_atomic(case.x, case.a, case.routing, case.active)
    assert case.error(case.expand(h, case.out.clone())) < TOLERANCE[torch.float32]
    again = shrink_atomic(case.x, case.a, case.routing, case.active, h=h.clone(), reset=False)
    assert torch.allclose(again[:, [0, 1, 3]], 2 * h[:, [0, 1, 3]], atol=1e-5)
    assert case.error(case.expand(again, case.out.clone())) > 0.5
    dirty = torch.full_like(h, torch.nan)  # "empty instead of zero"
    bad = shrink_atomic(case.x, case.a, case.routing, case.active, h=dirty, reset=False)
    assert case.expand(bad, case.out.clone())[0].isnan().all()


@kernels
def test_what_is_refused() -> None:
    case = Case([0, 1])
    with pytest.raises(ValueError, match="4 slices"):
        shrink(case.x, case.a * 4, case.routing, None, 2)
    with pytest.raises(ValueError, match="contiguous"):
        shrink(case.x, [case.a[0][:, :, ::2]], case.routing, None, 2)
    with pytest.raises(ValueError, match="one rank"):
        expand(case.shrink(), [case.b[0], case.b[0][..., :4]], case.out, case.routing, None, 2)
    with pytest.raises(ValueError, match="stride"):
        case.expand(case.shrink(), case.out.t().contiguous().t())
    h = case.shrink()
    for other in (h.mT.contiguous().mT, h[..., :4].contiguous(), h[:, :, :1].contiguous()):
        with pytest.raises(ValueError, match="as lora_shrink returns it"):
            case.expand(other, case.out)


@kernels
def test_few_configurations_serve_every_number_of_rows() -> None:
    """A launch may differ by rows in few ways, or a long prompt would compile kernels anew."""
    x = torch.empty(1, 4096, device=DEVICE)
    kinds = set()
    for rows in range(1, 8193):
        splits = launch.splits_of(rows, 3, 4096, x.device)
        plan = launch.shrink_launch(rows, 4, 4096, 16, splits, x)
        kinds.add((plan.block_m, plan.groups, plan.steps, plan.ways))
    assert len(kinds) <= 12, kinds


@pytest.mark.skipif(not HAS_TRITON or INTERPRET, reason="compiles, which the interpreter cannot")
@pytest.mark.parametrize("rank", [2, 3, 4, 16])
def test_ptxas_keeps_every_product(rank: int) -> None:
    """With few ranks ptxas 12.8 dropped all wgmmas of a tile, and h was zeros. No GPU needed."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minilora.ops.triton.shrink import _shrink_kernel

    names = _shrink_kernel.arg_names
    constants = {"R": rank, "SLICES": 1, "STEPS": 4, "GROUPS": 1, "BLOCK_M": 64, "BLOCK_R": 16}
    constants |= {"BLOCK_K": 128, "WAYS": 1, "LINES": 8}
    constants |= {"HAS_RANKS": False, "EARLY": True, "EXACT": False}
    kinds = dict.fromkeys(("x", "a0", "a1", "a2"), "*fp16") | {"h": "*fp32"}
    kinds |= dict.fromkeys(("mapping", "order", "active_ids", "counts", "ranks"), "*i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = {"x", "a0", "a1", "a2", "h", "width", "x_stride"}
    source = ASTSource(
        fn=_shrink_kernel,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 4}
    )
    products = [line for line in kernel.asm["sass"].splitlines() if "HGMMA" in line]
    assert len(products) == 4 * 8  # steps x (128 / 16)
    assert not [line for line in products if " RZ, gdesc" in line]
