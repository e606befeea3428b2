"""`StepChecker`: watch an engine serve, and check every step it runs.

Each step that has a graph runs four times on the same inputs: eagerly, from the graph, from the
graph again, and from the graph with poison in everything it must not read. All must agree bit
for bit, and none may write a KV entry that is not the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from minilora.batch import Batch, GraphMode
from minilora.engine.llm import LLM
from minilora.engine.request import Request
from minilora.engine.sampler import SampledToken
from minilora.engine.scheduler import ScheduledStep
from minilora.graphs.base import CaptureError
from minilora.graphs.dispatcher import GraphKey
from minilora.runner import ModelRunner
from minilora.testing.expected_step import check_step
from minilora.testing.faults import Fault, FaultFound, FaultKind
from minilora.testing.invariants import (
    check_blocks,
    check_dispatch,
    check_keys,
    check_launches,
    check_slots,
)
from minilora.testing.poison import Poison
from minilora.testing.step_runs import StepRuns, largest_difference, same_bits

MOST_FAULTS = 20  # one cause shows in many steps


class StepChecker:
    """Check the steps of an engine while it is used as ever.

    Use it as a context manager around calls of `LLM.generate`; look at `faults` afterwards, or
    call `assert_clean`.

    Args:
        llm: the engine.
        thorough: run the repeated and the poisoned replays too.

    Attributes:
        faults: what was found so far.
        eager_error: the largest difference of a replay from eager execution; 0.0 is bit-equal.
        num_steps, num_replays: steps seen, and those of them that had a graph.
        logits: for each request, (tokens before, logits row) of each token sampled.
    """

    def __init__(self, llm: LLM, thorough: bool = True) -> None:
        self._llm, self._runner, self._thorough = llm, llm.runner, thorough
        self._poison = Poison(llm)
        self.faults: list[Fault] = []
        self.num_steps = self.num_replays = 0
        self.eager_error = 0.0
        self.logits: dict[Request, list[tuple[int, torch.Tensor]]] = {}
        self._step: ScheduledStep | None = None
        self._last = torch.empty(0)
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> StepChecker:
        """Start watching; check first what was captured."""
        runner, core = self._runner, self._llm.core
        # Steps are checked whole, with all their tokens, so none is launched ahead meanwhile.
        core.settle()
        ahead, core.ahead = core.ahead, None
        config = self._llm.config
        max_loras = config.max_loras if config.enable_lora else 0
        self._note(check_keys(runner.dispatcher, max_loras, config.max_num_seqs))
        self._note(check_launches(runner, _one_of_each_case(runner.graphs)))
        execute, core_execute = runner.execute, core.execute

        def watched(step: ScheduledStep) -> Any:
            self._step = step
            self._note(check_blocks(self._llm.scheduler.running))
            try:
                sampled = core_execute(step)
            finally:
                self._step = None
            failed = next((request.error for request in step.requests if request.error), None)
            if failed is not None:
                self._note([Fault(FaultKind.STEP_FAILED, failed)])
            self._check_sampled(step, sampled)
            return sampled

        def undo() -> None:
            runner.execute = execute  # type: ignore[method-assign]
            core.execute = core_execute  # type: ignore[method-assign]
            core.ahead = ahead

        self._execute = execute
        runner.execute = self.execute  # type: ignore[method-assign]
        core.execute = watched  # type: ignore[method-assign]
        self._undo = undo
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Stop watching."""
        self._undo()

    def assert_clean(self) -> None:
        """Raise `FaultFound` if there is any fault."""
        if self.faults:
            raise FaultFound(self.faults)

    # ---- one step

    @torch.no_grad()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Run one step in place of `ModelRunner.execute`, and check it."""
        runner = self._runner
        self._poison.stale_buffers()
        self._poison.unowned_kv(batch)  # so that every write to a foreign entry is a change
        key, step = runner.prepare(batch)
        self.num_steps += 1
        self._note(check_dispatch(key, batch))
        self._note(check_step(step, batch, key.descriptor, runner.buffers.block_size))
        if self._step is not None:
            layers = list(runner.model.lora_layers())
            self._note(check_slots(layers, self._step.requests, batch))
        runs = StepRuns(self._llm, key, step, batch)
        eager = runs.eager()
        want = runs.sampled(eager)
        if key in runner.graphs:
            self.num_replays += 1
            self._note(_moved(runner))
            self._check_replays(runs, eager)
        runs.restore()
        self._note(runs.faults)
        logits = self._execute(batch)
        self._last = logits.clone()
        clean = not self.faults  # else the rows differ for a reason that has been told
        if clean and not same_bits(self._last, want):
            self._note([Fault(FaultKind.WRONG_ROWS, f"{len(logits)} rows, in {key.mode.name}")])
        return logits

    def _check_replays(self, runs: StepRuns, eager: torch.Tensor) -> None:
        first = runs.replay()
        error = 0.0 if same_bits(first, eager) else largest_difference(first, eager)
        self.eager_error = max(self.eager_error, error)
        second = runs.replay() if self._thorough else first
        if not same_bits(first, second):
            self._note([Fault(FaultKind.NOT_RESET, runs.where(second, first))])
        elif not same_bits(first, eager):
            self._note([runs.diagnose(first, eager)])
        elif self._thorough:
            self._check_poisoned(runs, eager)

    def _check_poisoned(self, runs: StepRuns, eager: torch.Tensor) -> None:
        self._poison.graph_scratch()
        scratch, real = runs.replay(), runs.num_real
        if not same_bits(scratch, eager):
            self._note([Fault(FaultKind.UNWRITTEN_MEMORY, runs.where(scratch, eager))])
            return
        poisoned = runs.poisoned_replay(self._poison)
        if not same_bits(poisoned[:real], eager[:real]):
            self._note([Fault(FaultKind.PADDING_LEAKS, runs.where(poisoned, eager))])

    def _check_sampled(self, step: ScheduledStep, sampled: Sequence[SampledToken]) -> None:
        """Keep each row of logits, and see that a greedy token is its own row's best."""
        for row, (request, token) in enumerate(zip(step.sampling, sampled, strict=False)):
            logits = self._last[row].cpu()
            if not bool(logits.isfinite().all()):
                by = request.adapter.name if request.adapter else "the base model"
                self._note([Fault(FaultKind.NOT_FINITE, f"row {row}, {by}")])
            self.logits.setdefault(request, []).append((request.num_tokens, logits))
            plain = request.params.greedy and request.params.repetition_penalty == 1.0
            best = int(logits.argmax())
            if plain and not request.banned_token_ids() and token.token_id not in (-1, best):
                detail = f"row {row} sampled {token.token_id}, but its logits say {best}"
                self._note([Fault(FaultKind.STALE_OUTPUT, detail)])

    def _note(self, faults: list[Fault]) -> None:
        self.faults += faults[: MOST_FAULTS - len(self.faults)]


def _moved(runner: ModelRunner) -> list[Fault]:
    assert runner.backend is not None
    try:
        runner.backend.check_addresses()
    except CaptureError as error:
        return [Fault(FaultKind.MOVED, str(error))]
    return []


def _one_of_each_case(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Return the first key of each mode and number of adapters."""
    cases: dict[tuple[GraphMode, int], GraphKey] = {}
    for key in keys:
        cases.setdefault((key.mode, key.descriptor.num_active_loras), key)
    return list(cases.values())
