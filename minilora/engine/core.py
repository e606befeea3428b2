"""`EngineCore`: the steps of an engine, and who waits for what they bring."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from minilora.engine.ahead import AheadEngine, Launched, launch, read
from minilora.engine.commit import commit_token, finish
from minilora.engine.intake import Asked, Intake
from minilora.engine.lock import EngineLock
from minilora.engine.outputs import RequestOutput, request_output
from minilora.engine.request import Request
from minilora.engine.sampler import SampledToken
from minilora.engine.scheduler import ScheduledStep, Scheduler
from minilora.runner import ModelRunner

logger = logging.getLogger("minilora")


class EngineCore:
    """Run steps for all callers. Every method may be called from any thread.

    Args:
        runner: runs one step.
        scheduler: decides which.
        max_model_len: the most tokens of prompt and answer together.
        async_scheduling: launch decode steps ahead, see `AheadEngine`.

    Attributes:
        ahead: None without `async_scheduling`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        async_scheduling: bool = False,
    ) -> None:
        self.lock = EngineLock()
        device = runner.buffers.packed.tensor.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.ahead = AheadEngine(runner, scheduler, max_model_len) if async_scheduling else None
        self.runner, self.scheduler, self._max_model_len = runner, scheduler, max_model_len
        self._answers: dict[str, list[Request]] = {}
        self._polled: set[str] = set()  # ids whose outputs are kept for `take_outputs`
        self._outputs: list[RequestOutput] = []
        self._dropped: deque[Request] = deque()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Hold the lock, on the device and stream that the engine was built on.

        Both are the calling thread's own otherwise, and a step on another stream could write the
        buffers that the step before still reads.
        """
        with self.lock:
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    def submit(
        self, intake: Intake, asked: Sequence[Asked], polled: bool = False
    ) -> list[list[Request]]:
        """Make the requests of some prompts and queue them; a Ctrl-C meanwhile leaves none.

        Raises:
            AdapterError: an adapter cannot be read any more; nothing was queued.
        """
        groups: list[list[Request]] = []
        try:
            with self.lock:
                intake.make(asked, groups)
                self.add(groups, polled)
        except BaseException:  # a Ctrl-C that waited for the lock's end, too
            self.abort(answer for group in groups for answer in group)
            raise
        return groups

    def add(self, groups: Iterable[list[Request]], polled: bool = False) -> None:
        """Queue the answers to some prompts; of `polled` ones the outputs are kept."""
        with self.lock:
            for group in groups:
                self._answers[group[0].request_id] = group
                if polled:
                    self._polled.add(group[0].request_id)
                for request in group:
                    self.scheduler.add(request)

    def has_work(self) -> bool:
        """Whether there are unfinished requests, or outputs to take."""
        with self.lock:
            self.abort_dropped()
            return self.scheduler.has_requests or bool(self._outputs)

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of polled requests that finished since the last call."""
        with self.lock:
            outputs, self._outputs = self._outputs, []
            return outputs

    def step(self) -> None:
        """Schedule, execute, commit.

        A request that fails ends with an error of its own; nothing is raised for it.
        """
        with self.on_device():
            self.abort_dropped()
            if self.ahead is not None:
                self._step_ahead(self.ahead)
                return
            step = self.scheduler.schedule()
            sampled = self.execute(step)
            self._commit(step, sampled)

    def _step_ahead(self, ahead: AheadEngine) -> None:
        try:
            launched = ahead.next()
            self._commit(launched.step, self._read(launched))
        except BaseException:
            ahead.take()  # it follows on tokens that were not committed; they are computed again
            raise
        ahead.drop_finished()

    def settle(self) -> None:
        """Read and commit the step that was launched ahead, and launch none after it."""
        with self.on_device():
            launched = self.ahead.take() if self.ahead is not None else None
            if launched is not None:
                self._commit(launched.step, self._read(launched))

    def execute(self, step: ScheduledStep) -> list[SampledToken]:
        """Run a step and sample from its logits; if it fails, its requests do."""
        return self._read(launch(self.runner, step))

    def _read(self, launched: Launched) -> list[SampledToken]:
        try:
            return read(launched)
        except Exception as error:
            requests = [request for request in launched.step.requests if not request.finished]
            logger.exception("a step failed; its %d requests end, others go on", len(requests))
            for request in requests:
                request.fail(f"the step failed: {type(error).__name__}: {error}")
            return []

    def _commit(self, step: ScheduledStep, sampled: Sequence[SampledToken]) -> None:
        for request, token in zip(step.sampling, sampled, strict=False):  # none if it failed
            if request.finished:
                continue  # it ended while this step was launched ahead
            try:
                commit_token(request, token, self._max_model_len)
            except Exception as error:
                logger.exception("request %s failed", request.request_id)
                request.fail(f"its token cannot be used: {type(error).__name__}: {error}")
        for request, row in zip(step.requests, step.batch.rows, strict=True):
            request.num_computed += len(row.token_ids)
        touched = (*step.failed, *step.requests)
        # Who ended before this step was read has given everything back already.
        ended = [r for r in touched if r.finished and self.scheduler.holds(r)]
        self._finish(ended, keep=True)

    def _finish(self, requests: Sequence[Request], keep: bool) -> None:
        """Give back what finished requests hold; keep the outputs that somebody will take."""
        for request in requests:
            self.scheduler.remove(request)
        for name in dict.fromkeys(request.request_id for request in requests):
            if all(answer.finished for answer in self._answers[name]):
                group = self._answers.pop(name)
                if name in self._polled and keep:
                    self._outputs.append(request_output(group))
                self._polled.discard(name)

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests with what they have; finished ones are left as they are."""
        with self.lock:
            unfinished = [request for request in requests if not request.finished]
            for request in unfinished:
                finish(request, "abort")
            self._finish(unfinished, keep=False)

    def abort_id(self, request_id: str) -> None:
        """End all answers of one id; an unknown id is ignored."""
        with self.lock:
            self.abort(list(self._answers.get(request_id, ())))

    def drop(self, requests: Iterable[Request]) -> None:
        """Note requests to be aborted by whoever comes next.

        The garbage collector may close a stream anywhere, also inside a step of the same
        thread; aborting there would change a step under its own feet.
        """
        self._dropped.extend(requests)

    def abort_dropped(self) -> None:
        """Abort what `drop` noted; the lock is held."""
        while self._dropped:
            self.abort([self._dropped.popleft()])
