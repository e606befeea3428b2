"""One broken variant for each fault that the upstream changes fixed or left, and some besides.

Each test breaks the system in one place, shows the wrong value, and shows that the harness names
the fault. The signature checkpoint says by the token alone what served a row: base continues
t + 1, adapter "down-k" says k.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import minilora.engine.ahead as ahead_module
import minilora.model.layers as model_layers
from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import Batch, BatchDescriptor, BatchRow, GraphMode
from minilora.graphs.base import CaptureError
from minilora.graphs.dispatcher import GraphDispatcher
from minilora.lora.layers import LoraEmbedding, LoraLayer
from minilora.lora.slots import AdapterSlots
from minilora.ops import packed
from minilora.ops.kernel_meta import NO_LORA, KernelMeta
from minilora.runner import ModelRunner
from minilora.step_buffers import StepBuffers
from minilora.testing.checker import StepChecker
from minilora.testing.expected_step import check_step
from minilora.testing.faults import FaultFound, FaultKind
from minilora.testing.invariants import check_keys
from minilora.testing.parity import run_parity
from minilora.testing.replay import check_replay
from tests.conftest import SignatureZoo

BACKENDS = ["recorded", *(["cuda"] if torch.cuda.is_available() else [])]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Engine:
    """An engine on the signature checkpoint, and what the harness finds in it."""

    def __init__(self, zoo: SignatureZoo, backend: str) -> None:
        self.zoo, self._backend = zoo, backend

    def start(self, **options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 2,
            "max_num_seqs": 4,
            "max_model_len": 32,
            "max_num_batched_tokens": 32,
            "num_kv_blocks": 16,
        }
        device = "cuda" if self._backend == "cuda" else "cpu"
        options = {**defaults, "graph": self._backend, "device": device, **options}
        self.llm = LLM(self.zoo.model, **options)
        return self.llm

    def ask(self, *names: str | None, tokens: int = 3) -> list[list[int]]:
        """Ask each adapter (None: base) after the token 4."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        loras = [None if name is None else LoRARequest(name, self.zoo(name)) for name in names]
        outputs = self.llm.generate([[4]] * len(names), params, loras, progress=False)
        return [output.token_ids for output in outputs]

    def found(self, *names: str | None, tokens: int = 3) -> set[FaultKind]:
        """Ask again under the harness, and return the kinds of fault it found."""
        with StepChecker(self.llm) as checker:
            self.ask(*names, tokens=tokens)
        return {fault.kind for fault in checker.faults}


BASE = [5, 6, 7]


@pytest.fixture
def engine(zoo: SignatureZoo, backend: str) -> Engine:
    return Engine(zoo, backend)


def test_the_unbroken_engine_is_clean(engine: Engine) -> None:
    """Else every test below would pass for nothing."""
    engine.start()
    assert engine.ask("down-7", None, "down-9") == [[7] * 3, BASE, [9] * 3]
    assert engine.found("down-7", None, "down-9", "v-2") == set()


# ---- the step's buffers


def test_padding_rows_that_are_not_written(engine: Engine, monkeypatch: Any) -> None:
    """#14626: a padding row kept the KV slot of the step before, and wrote there."""

    def only_real_rows(self: StepBuffers, rows: Any) -> None:
        for index, row in enumerate(rows):
            self.packed.host["input_ids"][index] = row.token_ids[0]
            self.packed.host["positions"][index] = row.start
            slot = row.block_ids[row.start // 16] * 16 + row.start % 16
            self.packed.host["slot_mapping"][index] = slot

    llm = engine.start()
    monkeypatch.setattr(StepBuffers, "_write_tokens", only_real_rows)
    rows = [BatchRow([5], 0, [block], NO_LORA, True) for block in (1, 2, 3, 4)]
    full = BatchDescriptor(4, 0, uniform=True)
    llm.runner.buffers.write(Batch(tuple(rows)), full, GraphMode.FULL)
    step = llm.runner.buffers.write(Batch(tuple(rows[:3])), full, GraphMode.FULL)
    assert step.slot_mapping.tolist() == [16, 32, 48, 64], "row 3 would write to block 4"
    assert FaultKind.STALE_STEP in engine.found(None, None, None)


def test_padding_that_writes_to_a_live_block(engine: Engine, monkeypatch: Any) -> None:
    """vLLM 43810: the -1 of a padding row was taken for the last slot of the pool."""
    plain = StepBuffers._write_tokens

    def last_slot(self: StepBuffers, rows: Any) -> None:
        plain(self, rows)
        self.packed.host["slot_mapping"][sum(len(r.token_ids) for r in rows) :] = 17 * 16 - 1

    llm = engine.start()
    monkeypatch.setattr(StepBuffers, "_write_tokens", last_slot)
    llm.kv_cache.tensor.fill_(0.5)
    engine.ask(None, None, None)
    assert not bool((llm.kv_cache.tensor[:, :, 16, 15] == 0.5).all()), "block 16 is not theirs"
    assert FaultKind.FOREIGN_KV in engine.found(None, None, None)


def test_input_ids_updated_in_place(engine: Engine, monkeypatch: Any) -> None:
    """#14626: the embedding added to its own input; garbage piled up over replays."""
    plain = LoraEmbedding.forward

    def in_place(self: LoraEmbedding, step: Any) -> torch.Tensor:
        out = plain(self, step)
        step.input_ids.add_(1)
        return out

    monkeypatch.setattr(LoraEmbedding, "forward", in_place)
    llm = engine.start()
    engine.ask(None)
    ids = llm.runner.buffers.packed.device["input_ids"]
    before = int(ids[0])
    key = next(key for key in llm.runner.graphs if key.descriptor.num_tokens == 1)
    _, step = llm.runner.prepare(Batch((BatchRow([5], 0, [1], NO_LORA, True),)))
    for _ in range(3):
        llm.runner.replay(key, step)
    assert int(ids[0]) == 8 != before, "5, and three replays"
    assert FaultKind.INPUT_WRITTEN in engine.found(None)


# ---- routing


def test_metadata_that_is_not_reset(engine: Engine, monkeypatch: Any) -> None:
    """A group of the step before is still there, and serves rows that have no adapter."""

    def keep_the_rest(self: KernelMeta, rows_of_slot: Any) -> int:
        slots = rows_of_slot.nonzero()[0]
        self._active[: len(slots)] = slots
        self._counts[: len(slots)] = rows_of_slot[slots]
        self._counts.cumsum(out=self._starts[1:])
        return len(slots)

    engine.start(specialize_active_lora=False)
    assert engine.ask("down-7", "down-9") == [[7] * 3, [9] * 3]
    monkeypatch.setattr(KernelMeta, "_write_groups", keep_the_rest)
    engine.ask("down-7", "down-9")
    served = engine.ask("down-7", None)[1]
    if engine._backend == "recorded":  # the kernel for few rows looks at each row's own mapping
        assert served == [9] * 3, "base is served by the group left over"
    assert FaultKind.WRONG_ROUTING in engine.found("down-7", None)


def count_no_lora_as_a_group(self: KernelMeta, mapping: Any, padded: int, count: int) -> int:
    """`KernelMeta.write` as vLLM 0.24 has it: -1 is sorted first, as a group like others."""
    slots = np.asarray(mapping, dtype=np.int32)
    self._mapping[:] = NO_LORA
    self._mapping[: len(slots)] = slots
    self._order[:] = self._rows
    self._order[: len(slots)] = slots.argsort(kind="stable")
    ids, counts = np.unique(slots, return_counts=True)
    ids, counts = ids[: self.max_loras], counts[: self.max_loras]
    self._active[:], self._counts[:] = NO_LORA, 0
    self._active[: len(ids)], self._counts[: len(ids)] = ids, counts
    self._counts.cumsum(out=self._starts[1:])
    self._show(padded)
    return len(ids)


def test_no_lora_counted_in_the_metadata_but_not_in_the_key(
    engine: Engine, monkeypatch: Any
) -> None:
    """vLLM 0.24: [A, none, B] has a grid of 2 over [-1, A, B], and B is dropped."""
    engine.start(max_loras=3)
    monkeypatch.setattr(KernelMeta, "write", count_no_lora_as_a_group)
    assert engine.ask("down-7", None, "down-9") == [[7] * 3, BASE, BASE], "down-9 is dropped"
    assert FaultKind.WRONG_ROUTING in engine.found("down-7", None, "down-9")


# ---- what is captured


def capture_with(change: Callable[[int], int]) -> Callable[..., None]:
    """`ModelRunner.capture`, but with another number of groups than the key says."""
    plain = ModelRunner.forward

    def capture(self: ModelRunner, key: Any, batch: Batch) -> None:
        def frozen(step: Any, depth: int | None = None) -> torch.Tensor:
            count = change(step.num_active_loras)
            return plain(self, dataclasses.replace(step, num_active_loras=count), depth)

        self.forward = frozen  # type: ignore[method-assign]
        try:
            original_capture(self, key, batch)
        finally:
            del self.forward

    return capture


original_capture = ModelRunner.capture


def test_a_grid_from_a_python_count(engine: Engine, monkeypatch: Any) -> None:
    """The count of the adapters at capture is frozen: one group, whatever comes later."""
    monkeypatch.setattr(ModelRunner, "capture", capture_with(lambda count: min(count, 1)))
    engine.start()
    assert engine.ask("down-7", "down-9")[1][1:] != [9, 9], "the second adapter is dropped"
    assert FaultKind.ADAPTER_DROPPED in engine.found("down-7", "down-9")


def test_captured_with_no_adapter_active(engine: Engine, monkeypatch: Any) -> None:
    """TGI 2180, vLLM 15090: the graph has no LoRA launch at all."""
    monkeypatch.setattr(ModelRunner, "capture", capture_with(lambda _: 0))
    engine.start()
    assert engine.ask("down-7") == [BASE]
    assert {FaultKind.NO_LORA_LAUNCHES, FaultKind.ADAPTER_DROPPED} <= engine.found("down-7")


def test_has_lora_ignored_at_dispatch(engine: Engine, monkeypatch: Any) -> None:
    """#25914 left the key without it in one place: the graph without LoRA serves adapters."""
    plain = GraphDispatcher.dispatch
    monkeypatch.setattr(
        GraphDispatcher, "dispatch", lambda self, rows, _, uniform: plain(self, rows, 0, uniform)
    )
    llm = engine.start()
    meta = KernelMeta.write
    monkeypatch.setattr(  # its own check refuses such a step; here it is to pass
        KernelMeta, "write", lambda self, mapping, padded, _: meta(self, mapping, padded, 2)
    )
    assert llm is engine.llm
    assert engine.ask("down-7") == [BASE]
    assert FaultKind.WRONG_GRAPH in engine.found("down-7")


def test_the_wrong_graph_cannot_pass_unseen(engine: Engine, monkeypatch: Any) -> None:
    """Without a harness: a step with more adapters than its grid is refused, not served wrong."""
    plain = GraphDispatcher.dispatch
    monkeypatch.setattr(
        GraphDispatcher, "dispatch", lambda self, rows, _, uniform: plain(self, rows, 0, uniform)
    )
    llm = engine.start()
    request = LoRARequest("a", engine.zoo("down-7"))
    output = llm.generate([[4]], SamplingParams(max_tokens=2), request, progress=False)[0]
    assert output.finish_reason == "error"
    assert "would drop rows" in str(output.error)


def test_counts_that_are_not_reset(monkeypatch: Any) -> None:
    """#32005: counts of an earlier initialisation (8 slots) stay when the keys are made again."""
    monkeypatch.setattr(GraphDispatcher, "reset", lambda self: None)
    plain = GraphDispatcher._take

    def keep_the_old(self: GraphDispatcher, keys: Any) -> None:
        plain(self, list({*getattr(self, "keys", ()), *keys}))

    monkeypatch.setattr(GraphDispatcher, "_take", keep_the_old)
    dispatcher = GraphDispatcher(
        graph_mode="full", max_num_seqs=8, max_num_batched_tokens=8, max_loras=8
    )
    dispatcher._max_num_seqs = dispatcher._max_loras = 2
    dispatcher.initialize()
    most = max(key.descriptor.num_active_loras for key in dispatcher.keys)
    assert most == 8, "eight adapters where two can be"
    kinds = {fault.kind for fault in check_keys(dispatcher, max_loras=2, max_num_seqs=2)}
    assert kinds == {FaultKind.UNREACHABLE_KEY}
    monkeypatch.undo()
    dispatcher.initialize()
    assert check_keys(dispatcher, max_loras=2, max_num_seqs=2) == []


def test_attention_frozen_in_a_piecewise_graph(engine: Engine, monkeypatch: Any) -> None:
    """The lengths of the capture's requests are those of every later step."""

    def inside(fn: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        y = fn(x, step)
        return torch.cat([y, x.new_zeros(len(x) - len(y), *y.shape[1:])])

    monkeypatch.setattr(model_layers, "outside_graph", inside)
    engine.start(graph_mode="piecewise", capture_sizes=[4])
    assert FaultKind.FROZEN_VALUE in engine.found(None, "v-3", tokens=4)


# ---- slots and outputs


def test_a_slot_overwritten_while_in_use(engine: Engine, monkeypatch: Any) -> None:
    def ignore_running(self: AdapterSlots) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        return min(self.resident, key=lambda version: version.last_used).slot

    engine.start()
    monkeypatch.setattr(AdapterSlots, "_free_slot", ignore_running)
    answers = engine.ask("down-7", "down-9", "down-2", tokens=4)
    assert answers[0] != [7] * 4, "its slot went to another while it ran"
    assert FaultKind.WRONG_SLOT in engine.found("down-3", "down-9", "down-5", tokens=4)


def test_a_slot_reused_without_clearing(engine: Engine, monkeypatch: Any) -> None:
    def no_zeroing(self: LoraLayer, slot: int, modules: Any) -> None:
        slices = zip(self.names, self.lora_a_stacked, self.lora_b_stacked, strict=True)
        for name, a_stacked, b_stacked in slices:
            if name in modules:
                weights = modules[name]
                self._write_a(a_stacked[slot], weights)
                b_stacked[slot, :, : weights.r].copy_(weights.b.float() * weights.scaling)
                self.lora_ranks[slot] = weights.r

    engine.start(max_loras=1)
    monkeypatch.setattr(LoraLayer, "write_slot", no_zeroing)
    engine.ask("v-2")
    assert engine.ask("down-7") == [[2] * 3], "the adapter before is still there"
    assert FaultKind.WRONG_SLOT in engine.found("down-7")


def test_an_output_read_after_the_next_replay(engine: Engine, monkeypatch: Any) -> None:
    llm, plain = engine.start(), ahead_module.draw
    other = Batch((BatchRow([20], 0, [9], NO_LORA, True),))

    def draw_late(logits: torch.Tensor, rows: Any) -> Any:
        key, step = llm.runner.prepare(other)
        llm.runner.replay(key, step)
        return plain(logits, rows)

    monkeypatch.setattr(ahead_module, "draw", draw_late)
    assert engine.ask(None, tokens=2) != [[5, 6]], "the tokens are those of the other step"
    assert FaultKind.STALE_OUTPUT in engine.found(None)


def test_a_weight_that_was_replaced(engine: Engine) -> None:
    """The graph goes on reading the old one; on the recorder the replay itself refuses."""
    llm = engine.start()
    norm = llm.runner.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    if engine._backend == "recorded":
        _, step = llm.runner.prepare(Batch((BatchRow([4], 0, [1], NO_LORA, True),)))
        with pytest.raises(CaptureError, match=r"'norm\.weight' has moved"):
            llm.runner.replay(next(iter(llm.runner.graphs)), step)
    else:
        assert FaultKind.MOVED in engine.found(None)


@CUDA
@pytest.mark.gpu
def test_a_pinned_buffer_rewritten_under_its_copy(monkeypatch: Any) -> None:
    """The copy of one step is still waiting when the next step is written to its source."""

    sizes = {"max_num_tokens": 8, "max_num_seqs": 4, "max_blocks": 2, "block_size": 16}
    tokens = range(5, 6 + packed.RING_DEPTH)  # the last one comes to the first one's buffer
    batches = [Batch((BatchRow([token], 0, [1], NO_LORA, True),)) for token in tokens]
    descriptor = BatchDescriptor(1, 0, uniform=True)

    def first_step_after_all() -> Any:
        buffers = StepBuffers(**sizes, max_loras=0, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # the copies wait behind this
        step = buffers.write(batches[0], descriptor, GraphMode.FULL)
        seen = buffers.packed.tensor.clone()
        for batch in batches[1:]:
            buffers.write(batch, descriptor, GraphMode.FULL)
        buffers.packed.tensor.copy_(seen)
        return step

    step = first_step_after_all()
    assert check_step(step, batches[0], descriptor, 16) == []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
    step = first_step_after_all()
    assert step.input_ids.tolist() == [tokens[-1]], "the first step got the last one's token"
    kinds = {fault.kind for fault in check_step(step, batches[0], descriptor, 16)}
    assert kinds == {FaultKind.STALE_STEP}


# ---- what the harness itself must not miss


def test_a_replay_that_raises(engine: Engine, monkeypatch: Any) -> None:
    """The engine ends the step's requests with an error and goes on: not unseen."""
    engine.start()

    def broken(self: ModelRunner, *_: Any) -> torch.Tensor:
        raise RuntimeError("replay failed")

    monkeypatch.setattr(ModelRunner, "replay", broken)
    with StepChecker(engine.llm) as checker:
        params = SamplingParams(temperature=0, max_tokens=2)
        outputs = engine.llm.generate([[4]], params, progress=False)
    assert outputs[0].finish_reason == "error"
    assert FaultKind.STEP_FAILED in {fault.kind for fault in checker.faults}


def test_graphs_that_are_not_used(engine: Engine) -> None:
    llm = engine.start()
    llm.runner.graphs.clear()
    report = run_parity(llm, workloads=["none"], oracle=False)
    assert {fault.kind for fault in report.faults} == {FaultKind.NOTHING_REPLAYED}
    assert set(llm.runner.num_steps) == {GraphMode.NONE}


def test_execute_that_returns_other_rows(engine: Engine, monkeypatch: Any) -> None:
    plain = ModelRunner.sampled_logits
    monkeypatch.setattr(
        ModelRunner, "sampled_logits", lambda self, *args: plain(self, *args).flip(0)
    )
    engine.start()
    assert engine.ask("down-7", None) != [[7] * 3, BASE], "each gets the other's token"
    assert FaultKind.WRONG_ROWS in engine.found("down-7", None)


def test_full_steps_in_which_a_row_does_not_sample(engine: Engine, monkeypatch: Any) -> None:
    """A chunk of one token in the middle of a prompt, while others decode."""
    llm = engine.start(max_num_seqs=4, max_num_batched_tokens=4)
    assert run_parity(llm, workloads=["staggered"], oracle=False).ok
    plain = ModelRunner.sampled_logits

    def first_rows(self: ModelRunner, out: torch.Tensor, step: Any, batch: Batch) -> torch.Tensor:
        if step.mode is GraphMode.FULL:
            return out[: sum(row.samples for row in batch.rows)]
        return plain(self, out, step, batch)

    monkeypatch.setattr(ModelRunner, "sampled_logits", first_rows)
    rows = (BatchRow([5], 0, [1, 2], NO_LORA, False), BatchRow([9], 0, [3], NO_LORA, True))
    with StepChecker(llm) as checker:
        logits = llm.runner.execute(Batch(rows))
    assert int(logits[0].argmax()) == 6, "the token after 5, which was not asked for"
    assert {fault.kind for fault in checker.faults} == {FaultKind.WRONG_ROWS}


def test_kv_entries_that_a_replay_leaves_wrong(engine: Engine, monkeypatch: Any) -> None:
    llm = engine.start()
    plain = ModelRunner.replay

    def and_spoil(self: ModelRunner, key: Any, step: Any) -> torch.Tensor:
        out = plain(self, key, step)
        llm.kv_cache.tensor[:, 1].flatten(1, 2)[:, step.slot_mapping.long()] += 1.0
        return out

    monkeypatch.setattr(ModelRunner, "replay", and_spoil)
    assert FaultKind.WRONG_KV in engine.found("v-2", None)


def test_requests_that_share_a_block_or_a_wrong_slot(engine: Engine) -> None:
    llm = engine.start()
    requests = [
        llm.add_request([4], SamplingParams(max_tokens=4), LoRARequest(n, engine.zoo(n)))
        for n in ("down-7", "down-9")
    ]
    llm.step()
    assert len(requests) == 2
    first, second = llm.scheduler.running
    first.lora_slot, second.lora_slot = second.lora_slot, first.lora_slot
    second.block_ids[:] = first.block_ids
    with StepChecker(llm) as checker:
        llm.step()
    kinds = {fault.kind for fault in checker.faults}
    assert {FaultKind.SHARED_BLOCK, FaultKind.WRONG_SLOT} <= kinds


def test_logits_that_are_nan(engine: Engine) -> None:
    llm = engine.start()
    engine.ask("down-7")
    for layer in llm.runner.model.lora_layers():
        for stack in layer.lora_b_stacked:
            stack.fill_(torch.nan)
    with StepChecker(llm) as checker:
        llm.generate([[4]], SamplingParams(max_tokens=2), LoRARequest("down-7"), progress=False)
    assert FaultKind.NOT_FINITE in {fault.kind for fault in checker.faults}


# ---- functions on their own


@pytest.fixture
def tensors(backend: str) -> types.SimpleNamespace:
    """A small LoRA product: x [4, 6] by A [6, 2] and B [2, 6]."""
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if backend == "cuda" else "cpu"
    x, a, b = (torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 2), (2, 6)))
    return types.SimpleNamespace(
        x=x.to(device), a=a.to(device), b=b.to(device), h=torch.zeros(4, 2, device=device),
        steps=[{"x": torch.randn(4, 6, generator=generator)} for _ in range(3)], backend=backend,
    )  # fmt: skip


def kinds_in(fn: Callable[[], Any], t: types.SimpleNamespace, **options: Any) -> set[FaultKind]:
    state = {"a": t.a, "b": t.b, "h": t.h}
    with pytest.raises(FaultFound) as error:
        check_replay(fn, {"x": t.x}, t.steps, state=state, backend=t.backend, **options)
    return {fault.kind for fault in error.value.faults}


def test_a_right_function_is_clean(tensors: Any) -> None:
    t = tensors
    state = {"a": t.a, "b": t.b}
    checked = check_replay(
        lambda: t.x @ t.a @ t.b, {"x": t.x}, t.steps, state=state, real_rows=[4, 2, 1],
        backend=t.backend,
    )  # fmt: skip
    assert checked >= 3 * 3


def test_a_shrink_buffer_that_is_not_cleared_inside_the_graph(tensors: Any) -> None:
    """Before #25914 it was cleared beside the op; forgotten, it adds up from replay to replay."""
    t = tensors
    partial = torch.zeros(4, 2, device=t.x.device)

    def fn() -> torch.Tensor:
        partial.add_(t.x @ t.a)  # split-K kernels add into it
        return partial @ t.b

    once = fn().clone()
    assert torch.allclose(fn(), 2 * once), "twice the update"
    with pytest.raises(FaultFound, match="not reset inside the graph"):
        check_replay(
            fn, {"x": t.x}, t.steps, scratch={"partial": partial},
            state={"a": t.a, "b": t.b}, backend=t.backend,
        )  # fmt: skip


def test_empty_instead_of_zeros(tensors: Any) -> None:
    t = tensors

    def fn() -> torch.Tensor:
        h = torch.empty(4, 2, device=t.x.device)
        h[:2] = (t.x @ t.a)[:2]  # rows 2 and 3 are never written
        return h @ t.b

    assert kinds_in(fn, t) == {FaultKind.UNWRITTEN_MEMORY}


def test_a_function_that_is_nan_both_ways(tensors: Any) -> None:
    """Eager and replay are the same bits, and both are wrong."""
    t = tensors
    assert kinds_in(lambda: t.x @ t.a * torch.nan, t) == {FaultKind.UNWRITTEN_MEMORY}


def test_a_number_taken_at_capture(tensors: Any) -> None:
    t = tensors
    rows = {"count": 1}

    def fn() -> torch.Tensor:
        return linear(t.x[: rows["count"]], t.b.T @ t.a.T)

    def steps() -> Iterator[dict[str, torch.Tensor]]:
        for count, step in zip((1, 3), t.steps, strict=False):
            rows["count"] = count
            yield step

    with pytest.raises(FaultFound, match="frozen"):
        check_replay(fn, {"x": t.x}, steps(), state={"a": t.a, "b": t.b}, backend=t.backend)


def test_padding_that_reaches_real_rows(tensors: Any) -> None:
    t = tensors
    kinds = kinds_in(lambda: t.x - t.x.mean(0), t, real_rows=[3, 3, 3])
    assert kinds == {FaultKind.PADDING_LEAKS}


@pytest.mark.parametrize("real", [[9, 9, 9], [4, 9, 9], [-1] * 3, [4, 4], [4, 4, 4, 1]], ids=str)
def test_real_rows_that_would_hide_a_leak(tensors: Any, real: list[int]) -> None:
    t = tensors
    with pytest.raises(ValueError, match="real_rows"):
        check_replay(lambda: t.x * 2, {"x": t.x}, t.steps, real_rows=real, backend=t.backend)


def test_a_step_of_another_shape_is_refused(tensors: Any) -> None:
    t = tensors
    steps = [t.steps[0], {"x": t.steps[0]["x"][:1]}]
    with pytest.raises(ValueError, match=r"step 1 gives 'x' the shape \[1, .*the buffer has \["):
        check_replay(lambda: t.x * 2, {"x": t.x}, steps, backend=t.backend)


def test_steps_that_would_hide_a_fault(tensors: Any) -> None:
    t, first = tensors, tensors.steps[0]
    for steps, reason in (
        ([first, first], "all steps are alike"),
        ([first, {**first, "X": first["x"]}], "'X', which is no input"),
        ([first, {"x": first["x"].to(torch.complex64)}], "of torch.complex64, but the buffer"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_replay(lambda: t.x * 2, {"x": t.x}, steps, backend=t.backend)


def test_real_rows_beside_what_has_no_rows(tensors: Any) -> None:
    t, scale, table = tensors, torch.ones(()).to(tensors.x), torch.ones(3).to(tensors.x)
    steps = [{**values, "scale": torch.tensor(2.0)} for values in t.steps]
    options = {"real_rows": [3, 3, 3], "backend": t.backend}
    assert check_replay(
        lambda: (t.x * scale, t.x.new_ones(())), {"x": t.x, "scale": scale}, steps, **options
    )
    with pytest.raises(ValueError, match="give a tensor that is no list of rows as state"):
        check_replay(
            lambda: t.x * table[0],
            {"x": t.x, "table": table},
            [{**values, "table": torch.ones(3)} for values in t.steps],
            **options,
        )


def test_too_few_steps_or_no_tensor(tensors: Any) -> None:
    t = tensors
    with pytest.raises(ValueError, match="got 1 steps"):
        check_replay(lambda: t.x + 1, {"x": t.x}, t.steps[:1], backend=t.backend)
    with pytest.raises(ValueError, match="returns no tensor"):
        check_replay(lambda: None, {"x": t.x}, t.steps, backend=t.backend)


def test_a_condition_on_a_tensor(tensors: Any) -> None:
    t = tensors
    kinds = kinds_in(lambda: t.x if t.x.sum() > 0 else -t.x, t)
    assert kinds == {FaultKind.NOT_CAPTURABLE}
