"""The Triton kernels where only a GPU shows it: every dtype, long batches, graphs, 2^31."""

from __future__ import annotations

import pytest
import torch

from minilora.ops import lora_expand, lora_shrink
from tests.triton_cases import DEVICE, RANKS, RUNS, TOLERANCE, Case, mapping_of, pairwise

if RUNS:
    from minilora.ops.triton import launch
    from minilora.ops.triton.expand import _expand_kernel
    from minilora.ops.triton.shrink import _shrink_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RUNS or DEVICE != "cuda", reason="needs a CUDA device and Triton"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 255, 257, 1024, 2049, 4096]
WIDTHS = [1, 33, 172, 2049, 4096, 28672]
OUTS = [(40,), (4096,), (1, 2049, 64), (1024, 256, 256)]
SLOTS = [(0,), (-1, 3), (-1, 0, 2, 9), tuple(range(16)), (-1, *range(15, 0, -2))]
MATRIX = pairwise(126, ROWS, WIDTHS, OUTS, RANKS, SLOTS, DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=lambda c: "-".join(map(str, c)))
def test_matrix(case: tuple) -> None:
    rows, width, outs, rank, slots, dtype = case
    Case(mapping_of(rows, slots, rows), width, outs, rank, 16, dtype=dtype).check()


@pytest.mark.parametrize("rank", [8, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_k5_long_batches_are_finite_and_right(rank: int, dtype: torch.dtype) -> None:
    """vLLM 47869, 48590, 52568; and the wgmma miscompile of older ptxas."""
    for rows in (1, 16, 400, 1000, 2048):
        case = Case(mapping_of(rows, (0, 1, 2, -1)), 4096, (4096,), rank, dtype=dtype)
        got = case.run()
        assert got.isfinite().all()
        assert case.error(got) < TOLERANCE[dtype]


def test_large_values_do_not_overflow_between_the_kernels() -> None:
    """h passes 65504, the largest fp16; the update itself does not."""
    case = Case([0, 1, 0, 1] * 8, 512, (64,), dtype=torch.float16)
    case.a = [a * 3e4 for a in case.a]
    case.b = [b * 1e-5 for b in case.b]
    case.x[:, ::2] *= 8
    got = case.run()
    assert case.shrink().sum(0).abs().max() > 65504
    assert got.isfinite().all()
    assert case.error(got) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("rows", [8, 32])
def test_a_graph_replays_on_new_routing(rows: int) -> None:
    case = Case([0, 1, 2, 3] * (rows // 4), 4096, (1024, 256, 256), dtype=torch.bfloat16)
    static = case.out.clone()
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.expand(case.shrink(), static)
    for mapping in ([-1] * rows, [3] * rows, mapping_of(rows, (-1, 0, 3)), [0, 1, 2, 3] * rows):
        case.mapping = mapping[:rows]
        case.meta.prepare(case.mapping, rows, 4)
        static.copy_(case.out)
        graph.replay()
        want = case.expand(case.shrink(), case.out.clone())
        assert torch.equal(static, want)
        assert any(slot >= 0 for slot in case.mapping) or torch.equal(static, case.out)
        case.error(static)
        case.check()


@pytest.mark.parametrize("rows", [8, 40])
def test_what_the_operation_before_wrote_is_read(rows: int) -> None:
    """Early launches must not read x, A or routing before the kernel in front is done."""
    case = Case(mapping_of(rows, (0, 1, 2, 3)), 4096, (4096,), rank=16, dtype=torch.bfloat16)
    a, x, order = case.a[0].clone(), case.x.clone(), case.routing.mapping.clone()
    want = case.shrink().sum(0)
    for _ in range(200):
        case.shrink()
        case.a[0].mul_(0)
        case.x.mul_(0)
        case.routing.mapping.fill_(-1)
        case.shrink()
        torch.add(a, 0, out=case.a[0])
        torch.add(x, 0, out=case.x)
        torch.add(order, 0, out=case.routing.mapping)
        assert torch.equal(case.shrink().sum(0), want)
    out = case.out.clone()
    want = case.run()
    for _ in range(200):  # out, and h, come from the kernel right before
        torch.add(case.out, 0, out=out)
        h = torch.add(case.shrink(), 0)
        case.expand(h, out)
        assert torch.equal(out, want)


def test_k1_offsets_beyond_2_to_the_31() -> None:
    """vLLM 53028: row x row stride passes 2^31 elements; here in x and in out."""
    rows, stride = 2049, 2**20
    storage = torch.zeros(2100 * stride, dtype=torch.bfloat16, device=DEVICE)
    wide = storage.view(-1, stride)[:rows]
    case = Case([-1] * (rows - 1) + [1], 64, (64,), 8, dtype=torch.bfloat16)
    want = case.run()
    wide[:, :64] = case.x
    case.x = wide[:, :64]
    assert torch.equal(case.run(), want)
    out = wide[:, 128:192]
    out.copy_(case.out)
    case.expand(case.shrink(), out)
    assert torch.equal(out, want)
    assert torch.equal(out[0], case.out[0])
    few = Case([-1] * 7 + [1], 64, (64,), 8, dtype=torch.bfloat16)  # rows found by mapping
    far = storage.as_strided((8, 64), (299 * stride, 1))
    far.copy_(few.x)
    want = few.run()
    few.x = far
    assert torch.equal(few.run(), want)


def test_p4_nothing_is_compiled_after_warm_up() -> None:
    """vLLM 8559, 43009, 49903."""

    def compiled() -> int:
        caches = (_shrink_kernel.device_caches, _expand_kernel.device_caches)
        return sum(len(cache[0]) for kernel in caches for cache in kernel.values())

    def step(rows: int) -> None:
        case = Case(mapping_of(rows, (0, 1, 2, 3)), 512, (96,), dtype=torch.bfloat16)
        case.active = 4
        case.run()

    case = Case([0], 512, (96,), dtype=torch.bfloat16)
    for rows in launch.rows_to_warm_up(700, 4, case.a, case.b):
        step(rows)
    before = compiled()
    for rows in (*range(1, 70), 127, 128, 129, 255, 256, 257, 512, 513, 700):
        step(rows)
    assert compiled() == before
    assert before > 0


def test_routing_uploaded_right_before_is_read() -> None:
    """`KernelMeta.prepare` is an asynchronous copy: no kernel, but in front of one."""
    rows = 8
    case = Case([0, 1, 2, 3] * 2, 4096, (4096,), rank=16, dtype=torch.bfloat16)
    mappings = [mapping_of(rows, (0, 1, 2, 3), seed) for seed in range(8)]
    want = []
    for mapping in mappings:
        case.meta.prepare(mapping, rows, 4)
        torch.cuda.synchronize()
        want.append(case.run())
    for _ in range(25):
        got = []
        for mapping in mappings:
            case.meta.prepare(mapping, rows, 4)
            got.append(case.run())
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("rows", [8, 40])
def test_the_ops_run_these_kernels(rows: int) -> None:
    case = Case(mapping_of(rows, (0, 1, -1, 3)), 4096, (1024, 256), rank=16, dtype=torch.bfloat16)
    want = case.run()

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        h = lora_shrink(x, case.a, case.meta, case.active)
        lora_expand(h, case.b, out, case.meta, case.active)
        return out

    assert torch.equal(step(case.x, case.out.clone()), want)
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    assert torch.equal(compiled(case.x, case.out.clone()), want)


def test_opcheck() -> None:
    """On rows that all have an adapter: what nobody reads in h is left as it was."""
    case = Case([0, 1, 2, 3] * 4, 512, (64, 32), rank=16)
    tables = (*case.routing, None, case.active)
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.minilora
    torch.library.opcheck(ops.lora_shrink.default, (case.x, case.a, *tables), test_utils=checked)
    arguments = (case.shrink(), case.b, case.out.clone(), *tables)
    torch.library.opcheck(ops.lora_expand.default, arguments, test_utils=checked)
