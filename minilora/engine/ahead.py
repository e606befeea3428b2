"""`AheadEngine`: launch a decode step before the host knows the tokens of the one before.

The device needs no host to go on: what a step samples is what the next one reads, and where it
will lie is known. So the next step is scheduled, written and launched while the last one runs, and
its token ids are copied on the device. Only then the host waits for the last step's tokens, and
commits them while the next one runs (vLLM calls this async scheduling).

The price: whether an answer ends with a token is seen one step late. The row that was launched for
it nevertheless is dropped, and its KV blocks go to nobody before that step has run.

Only greedy choices run ahead: others upload their settings or ask the device, which would wait for
the step just launched. Steps are in order on one CUDA stream, that of `EngineCore.on_device`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minilora.batch import Batch, BatchRow
from minilora.engine.request import Request
from minilora.engine.sampler import Drawn, SampledToken, SamplingRow, collect, draw
from minilora.engine.scheduler import ScheduledStep, Scheduler
from minilora.runner import ModelRunner

_UNKNOWN = 0  # stands for the token that the device has and the host has not


@dataclass(frozen=True)
class Launched:
    """A step on the device, and what will come of it.

    Attributes:
        step: what was scheduled.
        drawn: the tokens it chooses; None if the launch failed.
        logits: what they were chosen from, if a row wants log probabilities.
        error: why the launch failed.
    """

    step: ScheduledStep
    drawn: Drawn | None = None
    logits: torch.Tensor | None = None
    error: Exception | None = None


def launch(runner: ModelRunner, step: ScheduledStep) -> Launched:
    """Launch a step and the choice of its tokens; wait for neither."""
    if not step.requests:
        return Launched(step, Drawn(torch.empty(0, dtype=torch.int64)))
    try:
        logits = runner.execute(step.batch)
        wanted = len(step.sampling)
        if len(logits) != wanted:
            raise RuntimeError(f"{len(logits)} rows of logits for {wanted} requests")
        rows = [sampling_row(request) for request in step.sampling]
        wanted_later = any(row.params.logprobs is not None for row in rows)
        return Launched(step, draw(logits, rows), logits if wanted_later else None)
    except Exception as error:
        return Launched(step, error=error)


def read(launched: Launched) -> list[SampledToken]:
    """Wait for the tokens of a step.

    Raises:
        Exception: why the step failed.
    """
    if launched.error is not None:
        raise launched.error
    assert launched.drawn is not None
    rows = [sampling_row(request) for request in launched.step.sampling]
    return collect(launched.logits, rows, launched.drawn)


def step_after(
    launched: Launched, scheduler: Scheduler, max_model_len: int
) -> ScheduledStep | None:
    """Return the step that follows one whose tokens are not known; None if it depends on them.

    It is one more decode step of the same requests, in the same order. So there is none if
    another request could join, if one surely ends now, or if a choice needs the host.
    """
    step, drawn = launched.step, launched.drawn
    everybody = len(step.sampling) == len(step.requests) == len(scheduler.running)
    if drawn is None or not step.requests or not everybody:
        return None
    if scheduler.could_admit or not all(_goes_on(r, max_model_len) for r in step.requests):
        return None
    ends = [row.start + len(row.token_ids) for row in step.batch.rows]
    if not scheduler.extend_all(step.requests, [end + 1 for end in ends]):
        return None
    rows = tuple(
        BatchRow([_UNKNOWN], end, row.block_ids, row.lora_slot, samples=True)
        for row, end in zip(step.batch.rows, ends, strict=True)
    )
    return ScheduledStep(Batch(rows, sampled=drawn.token_ids), step.requests, ())


def _goes_on(request: Request, max_model_len: int) -> bool:
    """Return whether a request takes another token for sure, unless it stops by its text."""
    params, made = request.params, len(request.output_token_ids) + 1
    alone = params.greedy and params.repetition_penalty == 1.0 and params.logprobs is None
    longer = made < params.max_tokens and request.num_tokens + 1 < max_model_len
    return not request.finished and alone and longer and not request.banned_token_ids()


def sampling_row(request: Request) -> SamplingRow:
    """Return what the sampler needs of a request."""
    return SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        rng=request.rng,
        banned_token_ids=request.banned_token_ids(),
    )


class AheadEngine:
    """Keeps one step launched ahead of the one that is read.

    Args:
        runner: runs the steps.
        scheduler: decides the steps that depend on what came before.
        max_model_len: the most tokens of prompt and answer together.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, max_model_len: int) -> None:
        self._runner, self._scheduler, self._max_model_len = runner, scheduler, max_model_len
        self._launched: Launched | None = None
        self.num_ahead = 0  # steps that were launched before the tokens before them were known

    def take(self) -> Launched | None:
        """Return the step that is launched and not read; it is the caller's to read."""
        launched, self._launched = self._launched, None
        return launched

    def drop_finished(self) -> None:
        """Forget the launched step if nobody waits for it any more."""
        launched = self._launched
        if launched is not None and all(r.finished for r in launched.step.requests):
            self._launched = None

    def next(self) -> Launched:
        """Return the next step to read; the one after it is launched, where that can be."""
        current = self.take() or launch(self._runner, self._scheduler.schedule())
        after = step_after(current, self._scheduler, self._max_model_len)
        if after is not None:
            self.num_ahead += 1
            self._launched = launch(self._runner, after)
        return current
