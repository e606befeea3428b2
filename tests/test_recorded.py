"""`RecordedBackend`: what it replays, what it refuses, and what its memory does."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minilora.batch import StepContext
from minilora.graphs.base import CaptureError
from minilora.graphs.piecewise import capture_piecewise, outside_graph
from minilora.graphs.recorded import RecordedBackend
from minilora.ops import KernelMeta, lora_expand, lora_shrink
from minilora.ops.scratch import blank, empty, filled, poison_
from minilora.testing.step_runs import same_bits


class Fixed:
    """Fixed tensors, and a backend to which they are declared."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(0)
        self.x, self.w, self.state = self.random(4, 8), self.random(8, 8), self.random(4, 8)
        self.backend = RecordedBackend(lambda: {"x": self.x, "w": self.w, "state": self.state})

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)

    def renew(self) -> None:
        self.x.copy_(self.random(4, 8))


@pytest.fixture
def fixed(device: str) -> Fixed:
    return Fixed(device)


# ---- bit for bit


def in_place(f: Fixed) -> torch.Tensor:
    y = f.x @ f.w
    y.mul_(2).add_(f.x)
    y[1:3] = f.x[:2]
    return y


def with_out(f: Fixed) -> torch.Tensor:
    y = torch.empty(4, 8, device=f.device)
    torch.mm(f.x, f.w, out=y)
    return torch.cat([y, f.x], out=torch.empty(8, 8, device=f.device))


def views(f: Fixed) -> torch.Tensor:
    top, bottom = (f.x @ f.w).split(2)
    left, right = torch.cat([bottom, top]).chunk(2, dim=1)
    return (left.T.reshape(4, 4) + right.unflatten(0, (2, 2)).flatten(0, 1)).contiguous()


def factories(f: Fixed) -> torch.Tensor:
    position = torch.arange(8, device=f.device)
    return torch.where(position < 3, f.x, torch.zeros(4, 8, device=f.device)) + f.x.new_full((), 2)


def reductions(f: Fixed) -> tuple[torch.Tensor, torch.Tensor]:
    best = f.x.max(dim=-1)
    return best.values.softmax(-1), best.indices + 1


def half(f: Fixed) -> torch.Tensor:
    return torch.nn.functional.rms_norm(f.x.half(), (8,)).float() @ f.w


def indexing(f: Fixed) -> torch.Tensor:
    rows = torch.arange(3, -1, -1, device=f.device)
    return f.w.index_select(0, rows)[rows] + f.x


FUNCTIONS = [in_place, with_out, views, factories, reductions, half, indexing]


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_replay_is_bit_identical_on_new_inputs(fixed: Fixed, fn: Callable[[Fixed], Any]) -> None:
    captured = fixed.backend.capture(lambda: fn(fixed))
    addresses = [leaf.data_ptr() for leaf in leaves(captured.output)]
    for _ in range(3):
        fixed.renew()
        want = [leaf.clone() for leaf in leaves(fn(fixed))]
        got = leaves(captured.replay())
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
        assert [leaf.data_ptr() for leaf in got] == addresses


def test_state_is_written_once_a_replay(fixed: Fixed) -> None:
    captured = fixed.backend.capture(lambda: fixed.state.add_(1.0))
    fixed.state.zero_()
    for count in (1, 2, 3):
        captured.replay()
        assert bool((fixed.state == count).all())


def test_lora_ops_are_one_launch_each_and_follow_their_tables(fixed: Fixed) -> None:
    meta = KernelMeta(4, 2, fixed.device)
    a, b = [fixed.random(2, 3, 8)], [fixed.random(2, 8, 3)]
    tables = {f"table {i}": table for i, table in enumerate(meta.tables)}
    backend = RecordedBackend({"x": fixed.x, "a": a[0], "b": b[0], "w": fixed.w, **tables})

    def fn() -> torch.Tensor:
        out = fixed.x @ fixed.w
        lora_expand(lora_shrink(fixed.x, a, meta, 2), b, out, meta, 2)
        return out

    meta.prepare([0, 1, 0, -1], 4, 2)
    captured = backend.capture(fn)
    assert captured.nodes() == ["aten::mm", "minilora::lora_shrink", "minilora::lora_expand"]
    for mapping in ([1, 1, 0, 0], [-1, 0, -1, -1], [-1] * 4, [1, 0, 1, 0]):
        meta.prepare(mapping, 4, 2)
        fixed.renew()
        assert same_bits(captured.replay(), fn())


def test_nodes_are_launches_only(fixed: Fixed) -> None:
    def fn() -> torch.Tensor:
        y = torch.empty(4, 8, device=fixed.device)  # memory is no launch
        y.copy_(fixed.x.view(8, 4).view(4, 8))  # nor is a view
        return y.relu()

    assert fixed.backend.capture(fn).nodes() == ["aten::copy_", "aten::relu"]


def test_a_python_value_is_frozen(fixed: Fixed) -> None:
    scale = [2.0]
    captured = fixed.backend.capture(lambda: fixed.x * scale[0])
    scale[0] = 3.0
    assert torch.equal(captured.replay(), fixed.x * 2.0), "the value of the capture"


# ---- what is refused


def undeclared(f: Fixed) -> Any:
    other = f.random(4, 8)
    return lambda: f.x + other


REFUSED: dict[str, tuple[Callable[[Fixed], Callable[[], Any]], str]] = {
    "item": (lambda f: lambda: f.x.sum().item(), "item"),
    "tolist": (lambda f: lambda: f.x.tolist(), "tolist"),
    "numpy": (lambda f: lambda: f.x.numpy(), "numpy"),
    "array": (lambda f: lambda: np.asarray(f.x), "numpy"),
    "condition": (lambda f: lambda: 1 if f.x.sum() > 0 else 2, "condition"),
    "float": (lambda f: lambda: float(f.x[0, 0]), "number"),
    "nonzero": (lambda f: lambda: f.x.nonzero(), "nonzero"),
    "mask": (lambda f: lambda: f.x[f.x > 0], "mask"),
    "masked write": (lambda f: lambda: f.state.index_put_((f.x > 0,), f.x.sum()), "mask"),
    "masked_select": (lambda f: lambda: f.x.masked_select(f.x > 0), "masked_select"),
    "unique": (lambda f: lambda: torch.unique(f.x), "unique"),
    "constant": (lambda f: lambda: f.x + torch.tensor(1.0), "constant from the host"),
    "random": (lambda f: lambda: f.x + torch.rand(8, device=f.device), "random"),
    "cpu": (lambda f: lambda: f.x.cpu(), "host"),
    "device": (lambda f: lambda: f.x.to("meta"), "between devices"),
    "dlpack": (lambda f: lambda: np.from_dlpack(f.x), "dlpack"),
    "set_": (lambda f: lambda: (f.x + 1).set_(f.w), "changes which memory"),
    "resize_": (lambda f: lambda: (f.x + 1).resize_(2, 2), "changes which memory"),
    "unsqueeze_": (lambda f: lambda: (f.x + 1).unsqueeze_(0), "changes which memory"),
    "undeclared": (undeclared, r"\[4, 8\] of torch.float32 that is not declared static"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_line(fixed: Fixed, name: str) -> None:
    make, reason = REFUSED[name]
    fn = make(fixed)
    line = inspect.getsourcelines(fn)[1]
    with pytest.raises(CaptureError, match=rf"test_recorded\.py:{line}: .*{reason}"):
        fixed.backend.capture(fn)
    assert torch.equal(fixed.backend.capture(lambda: fixed.x + 1).replay(), fixed.x + 1)
    assert fixed.x.sum().item() is not None, "no mode is left on"


def test_data_that_was_assigned(fixed: Fixed) -> None:
    def fn() -> torch.Tensor:
        y = fixed.x + 1
        y.data = fixed.x * 2
        return y + 0

    with pytest.raises(CaptureError, match=r"\[4, 8\] was made to show other memory"):
        fixed.backend.capture(fn)
    assert torch.equal(fixed.backend.capture(lambda: fixed.x + 1).replay(), fixed.x + 1)


def test_an_exception_of_the_function_passes(fixed: Fixed) -> None:
    with pytest.raises(ZeroDivisionError):
        fixed.backend.capture(lambda: 1 // 0)
    assert fixed.backend.capture(lambda: fixed.x * 2).nodes() == ["aten::mul"]


def test_a_capture_in_a_capture(fixed: Fixed) -> None:
    with pytest.raises(CaptureError, match="running already"):
        fixed.backend.capture(lambda: fixed.backend.capture(lambda: fixed.x))


def test_a_tensor_that_was_replaced(fixed: Fixed) -> None:
    captured = fixed.backend.capture(lambda: fixed.x @ fixed.w)
    fixed.w = fixed.w.clone()
    with pytest.raises(CaptureError, match="'w' has moved since capture"):
        captured.replay()


# ---- memory


def test_unwritten_memory_is_nan_at_every_replay(fixed: Fixed) -> None:
    def fn() -> torch.Tensor:
        y = torch.empty(4, 8, device=fixed.device)
        y[:2] = fixed.x[:2]
        return y + 0.0

    captured = fixed.backend.capture(fn)
    for _ in range(2):
        out = captured.replay()
        assert bool(out[2:].isnan().all())
        assert torch.equal(out[:2], fixed.x[:2])


def test_integers_and_bools_that_are_not_written(fixed: Fixed) -> None:
    def fn() -> tuple[torch.Tensor, ...]:
        kinds = (torch.int32, torch.uint8, torch.bool)
        return tuple(torch.empty(2, dtype=dtype, device=fixed.device).clone() for dtype in kinds)

    ints, small, bools = fixed.backend.capture(fn).replay()
    assert (ints.tolist(), small.tolist()) == ([2**31 - 1] * 2, [255] * 2)
    assert bools.tolist() == [True, True]


def test_graphs_of_one_pool_overwrite_each_other(fixed: Fixed) -> None:
    """As CUDA's do: an output must be read before the next replay, or copied."""
    first = fixed.backend.capture(lambda: fixed.x + 1.0)
    second = fixed.backend.capture(lambda: fixed.x + 2.0)
    kept = first.replay()
    assert torch.equal(kept, fixed.x + 1.0)
    second.replay()
    assert not torch.equal(kept, fixed.x + 1.0)


def test_memory_is_used_again_within_a_graph_and_by_the_next(fixed: Fixed) -> None:
    def chain(length: int) -> Callable[[], torch.Tensor]:
        def fn() -> torch.Tensor:
            y = fixed.x
            for _ in range(length):
                y = torch.tanh(y)
            return y

        return fn

    captured = fixed.backend.capture(chain(20))
    nbytes = fixed.x.nbytes
    assert fixed.backend.pool_memory == 2 * nbytes, "one is read while the other is written"
    for length in (1, 5, 19):
        fixed.backend.capture(chain(length))
    assert fixed.backend.pool_memory == 2 * nbytes
    assert same_bits(captured.replay(), chain(20)())


def test_what_somebody_still_holds_is_not_used_again(fixed: Fixed) -> None:
    """CUDA keeps such memory too: it is free only when the last reference is gone."""
    held: list[torch.Tensor] = []

    def fn() -> Any:
        held[:] = [fixed.x + 1]
        y = held[0] * 2
        for _ in range(5):
            y = torch.tanh(y)
        return types.SimpleNamespace(y=y)

    captured = fixed.backend.capture(fn)
    recorded = held[0]
    for _ in range(2):
        fixed.renew()
        out = captured.replay()
        assert torch.equal(recorded, fixed.x + 1)
        assert same_bits(out.y, fn().y)


def test_a_parameter_that_is_returned(fixed: Fixed) -> None:
    captured = fixed.backend.capture(lambda: torch.nn.Parameter(fixed.x + 1, requires_grad=False))
    for _ in range(2):
        fixed.renew()
        assert torch.equal(captured.replay(), fixed.x + 1)


def test_an_output_that_was_resized(fixed: Fixed) -> None:
    def fn() -> torch.Tensor:
        out = torch.empty(0, device=fixed.device)
        torch.mm(fixed.x, fixed.w, out=out)
        return out

    captured = fixed.backend.capture(fn)
    fixed.renew()
    assert same_bits(captured.replay(), fn())


def test_replay_does_not_follow_autocast(fixed: Fixed) -> None:
    captured = fixed.backend.capture(lambda: fixed.x @ fixed.w)
    want = (fixed.x @ fixed.w).clone()
    with torch.autocast(fixed.device.type, dtype=torch.bfloat16):
        assert same_bits(captured.replay(), want)


def test_poison_between_replays_does_not_show(fixed: Fixed) -> None:
    captured = fixed.backend.capture(lambda: in_place(fixed))
    fixed.backend.poison()
    assert bool(captured.output.isnan().all())
    assert same_bits(captured.replay(), in_place(fixed))


def test_scratch_of_op_bodies_is_filled_while_recording() -> None:
    device = torch.device("cpu")
    assert blank([3], torch.float32, device).tolist() == [0, 0, 0]
    with filled():
        for make in (empty, blank):
            assert bool(make([3], torch.float32, device).isnan().all())
        assert empty([2], torch.int64, device).tolist() == [2**63 - 1] * 2
    assert math.isnan(float(poison_(torch.zeros(1, dtype=torch.bfloat16))))


# ---- pieces


class Step:
    """Stands for a `StepContext`: how many rows are real."""

    def __init__(self, real: int) -> None:
        self.real = real


def attend(x: torch.Tensor, step: Any) -> torch.Tensor:
    """Something that no graph may freeze: it looks at the numbers, and at the real rows only."""
    return x[: step.real].cumsum(0) * (2.0 if x[: step.real].sum().item() > 0 else 3.0)


def in_pieces(fixed: Fixed) -> Callable[[StepContext], torch.Tensor]:
    def fn(step: StepContext) -> torch.Tensor:
        y = fixed.x @ fixed.w
        z = outside_graph(attend, y, step) + y
        return outside_graph(attend, z.relu(), step) @ fixed.w + y

    return fn


def test_pieces_with_eager_gaps(fixed: Fixed) -> None:
    fn: Any = in_pieces(fixed)
    graph = capture_piecewise(fixed.backend, fn, Step(4))  # type: ignore[arg-type]
    assert graph.num_pieces == 3
    assert graph.nodes() == ["aten::mm", "aten::add", "aten::relu", "aten::mm", "aten::add"]
    for real in (4, 1, 3, 2, 4):
        fixed.renew()
        want = fn(Step(real))
        assert same_bits(graph.replay(Step(real)), want)  # type: ignore[arg-type]
        fixed.backend.poison()


def test_rows_outside_of_the_gap_are_zero(fixed: Fixed) -> None:
    """Whatever lay there: a row that keeps what it had would be stale."""
    fn: Any = lambda step: outside_graph(attend, fixed.x + 0.0, step) + 0.0  # noqa: E731
    graph = capture_piecewise(fixed.backend, fn, Step(4))  # type: ignore[arg-type]
    out = graph.replay(Step(2))  # type: ignore[arg-type]
    assert not bool(out[2:].any())
    assert same_bits(out, fn(Step(2)))


def test_an_error_in_a_gap_leaves_nothing_behind(fixed: Fixed) -> None:
    def broken(x: torch.Tensor, step: Any) -> torch.Tensor:
        raise RuntimeError("gap")

    with pytest.raises(RuntimeError, match="gap"):
        capture_piecewise(
            fixed.backend,
            lambda step: outside_graph(broken, fixed.x + 1, step),
            Step(4),  # type: ignore[arg-type]
        )
    fn: Any = in_pieces(fixed)
    assert same_bits(
        capture_piecewise(fixed.backend, fn, Step(4)).replay(Step(3)),
        fn(Step(3)),  # type: ignore[arg-type]
    )
