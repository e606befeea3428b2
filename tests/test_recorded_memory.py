"""`RecordedBackend`: memory it moves, memory it must leave, and numbers on its tape."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minilora import LLM
from minilora.graphs.base import CaptureError
from minilora.ops.scratch import poison_
from minilora.testing.step_runs import same_bits
from tests.test_recorded import Fixed


@pytest.fixture
def fixed(device: str) -> Fixed:
    return Fixed(device)


# ---- memory that somebody still shows


def made_a_parameter(f: Fixed) -> Any:
    return types.SimpleNamespace(y=torch.nn.Parameter(f.x + 1, requires_grad=False))


def kept_the_storage(f: Fixed) -> Any:
    y = f.x + 1
    return types.SimpleNamespace(storage=y.untyped_storage(), like=torch.empty_like(y))


def kept_a_base(f: Fixed) -> Any:
    """The references of its views must not be taken for the holder's."""
    y = f.x + 1
    z = y.view(8, 4) * 2
    for _ in range(5):
        z = torch.tanh(z.view(4, 8)).view(8, 4)
    return types.SimpleNamespace(y=y, z=z)


def kept_a_view(f: Fixed) -> Any:
    top = (f.x + 1)[:2]
    z = f.x * 2
    for _ in range(5):
        z = torch.tanh(z)
    return types.SimpleNamespace(y=top, z=z)


def shown(held: Any) -> list[torch.Tensor]:
    """Return copies of what the holder's attributes show."""
    if hasattr(held, "storage"):
        return [held.like.new_empty(0).set_(held.storage, 0, (4, 8), (8, 1)).clone()]
    return [tensor.clone() for tensor in vars(held).values()]


HOLDERS = [made_a_parameter, kept_the_storage, kept_a_base, kept_a_view]


@pytest.mark.parametrize("fn", HOLDERS, ids=lambda fn: fn.__name__)
def test_what_is_still_shown_follows_every_replay(fixed: Fixed, fn: Callable[[Fixed], Any]) -> None:
    captured = fixed.backend.capture(lambda: fn(fixed))
    for _ in range(2):
        fixed.renew()
        got = shown(captured.replay())
        assert all(same_bits(a, b) for a, b in zip(got, shown(fn(fixed)), strict=True))


@pytest.mark.parametrize("fn", [made_a_parameter, kept_the_storage], ids=lambda fn: fn.__name__)
def test_memory_that_cannot_move_is_the_graph_s_own(
    fixed: Fixed, fn: Callable[[Fixed], Any]
) -> None:
    assert fixed.backend.capture(lambda: fn(fixed)).memory == fixed.x.nbytes
    assert fixed.backend.capture(lambda: fixed.x + 1).memory == 0


def test_a_view_that_was_made_between_two_pieces(fixed: Fixed) -> None:
    with torch.no_grad():
        capture = fixed.backend.start()
        capture.begin()
        y = fixed.x + 1
        first = capture.end()
        top = y[:2]  # nobody told the recorder
        capture.begin()
        z = y * 2
        second = capture.end()
        assert capture.finish() == y.nbytes
    for _ in range(2):
        fixed.renew()
        first.replay()
        second.replay()
        assert torch.equal(top, (fixed.x + 1)[:2])
        assert torch.equal(z, (fixed.x + 1) * 2)


def test_graphs_of_a_model_keep_nothing_of_their_own(tiny_llama: Path) -> None:
    llm = LLM(
        tiny_llama, graph="recorded", enable_lora=True, max_loras=2, max_num_seqs=4,
        max_num_batched_tokens=32, max_model_len=64, num_kv_blocks=16, device="cpu",
    )  # fmt: skip
    graphs = llm.runner.graphs
    assert graphs
    assert {graph.memory for graph in graphs.values()} == {0}


# ---- memory that nobody shows any more


def reshaped(y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(y.view(8, 4)).view(4, 8)


def split(y: torch.Tensor) -> torch.Tensor:
    top, bottom = y.split(2)
    return torch.cat([bottom, top])


def written_by_parts(y: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(y)
    z[:] = y
    z[1:].mul_(2)
    return z


@pytest.mark.parametrize("link", [reshaped, split, written_by_parts], ids=lambda fn: fn.__name__)
def test_views_do_not_keep_memory_from_being_used_again(
    fixed: Fixed, link: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def chain() -> torch.Tensor:
        y = fixed.x
        for _ in range(10):
            y = link(y)
        return y

    captured = fixed.backend.capture(chain)
    assert fixed.backend.pool_memory == 2 * fixed.x.nbytes
    fixed.renew()
    assert same_bits(captured.replay(), chain())


# ---- an op that returns memory of its own


@pytest.fixture
def cached(fixed: Fixed) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An op that writes its result to the same memory every time."""
    workspace = torch.empty(4, 8, device=fixed.device)
    library = torch.library.Library("minilora_test", "DEF")
    library.define("cached(Tensor x) -> Tensor")
    key = "CUDA" if fixed.device.type == "cuda" else "CPU"
    library.impl("cached", lambda x: workspace.copy_(x * 2), key)
    yield torch.ops.minilora_test.cached
    library._destroy()


def test_an_op_that_returns_the_same_memory_twice(
    fixed: Fixed, cached: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Its second launch was once taken for a view, and not replayed."""
    fn = lambda: [cached(fixed.x) + 0, cached(fixed.w[:4]) + 0]  # noqa: E731
    line = inspect.getsourcelines(fn)[1]
    reason = rf"test_recorded_memory\.py:{line}: minilora_test::cached returns memory that it keeps"
    with pytest.raises(CaptureError, match=reason):
        fixed.backend.capture(fn)


def test_an_op_that_returns_memory_of_another_graph(
    fixed: Fixed, cached: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    first = fixed.backend.capture(lambda: cached(fixed.x) + 0)
    with pytest.raises(CaptureError, match="minilora_test::cached returns memory that it keeps"):
        fixed.backend.capture(lambda: cached(fixed.x) + 0)
    fixed.renew()
    assert torch.equal(first.replay(), fixed.x * 2)


# ---- numbers and constants


def test_a_number_that_is_assigned_is_frozen(fixed: Fixed) -> None:
    """CUDA takes it with the launch; on a CPU torch makes a tensor of it first."""
    value = [5.0]

    def fn() -> torch.Tensor:
        y = fixed.x + 0
        y[0] = value[0]
        y[1:3, 2] = -1
        y[torch.arange(2, 4, device=fixed.device), 0] = 7
        y[..., -1] = True
        return y

    captured = fixed.backend.capture(fn)
    for _ in range(2):
        fixed.renew()
        assert same_bits(captured.replay(), fn())
    want, value[0] = fn(), 6.0
    assert same_bits(captured.replay(), want), "the value of the capture"


def assign_then_constant(f: Fixed) -> torch.Tensor:
    y = f.x + 0
    y[0] = 1.0
    return y + f.x.new_tensor(1.0)


CONSTANTS: dict[str, Callable[[Fixed], Any]] = {
    "from_numpy": lambda f: f.x + torch.from_numpy(np.ones(8, np.float32)),
    "as_tensor": lambda f: f.x + torch.as_tensor([1.0]),
    "new_tensor": lambda f: f.x + f.x.new_tensor([1.0]),
    "new_tensor of a number": lambda f: f.x + f.x.new_tensor(1.0),
    "list of rows": lambda f: f.x[[0, 2]],
    "assignment to a list of rows": lambda f: (f.x + 0).__setitem__([0, 2], 1.0),
    "after an assignment": assign_then_constant,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_host_are_refused(fixed: Fixed, name: str) -> None:
    with pytest.raises(CaptureError, match=r"test_recorded_memory\.py:\d+: .*(static|host|device)"):
        fixed.backend.capture(lambda: CONSTANTS[name](fixed))


# ---- modes, and poison


def test_inference_mode_is_refused(fixed: Fixed) -> None:
    with torch.inference_mode(), pytest.raises(CaptureError, match=r"use torch\.no_grad"):
        fixed.backend.capture(lambda: fixed.x + 1)
    captured = fixed.backend.capture(lambda: fixed.x + 1)
    with torch.inference_mode():
        assert torch.equal(captured.replay(), fixed.x + 1)


def test_both_parts_of_a_complex_number_are_poisoned(device: str) -> None:
    poisoned = poison_(torch.zeros(2, dtype=torch.complex64, device=device))
    assert bool(torch.view_as_real(poisoned).isnan().all())
