"""`Scheduler`: which requests run in the next step, and with which tokens.

Continuous batching with a token budget and chunked prefill (Orca, OSDI 2022; Sarathi,
arXiv:2308.16369). Running requests come first; what is left of the budget admits waiting ones
in order of arrival. A request whose adapter finds no slot is passed over, so that it blocks
nobody behind it; one that was passed too often reserves the slot that frees soonest. When
KV blocks run out, the request admitted last gives up its own and is computed again later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from minilora.batch import NO_LORA, Batch, BatchRow
from minilora.engine.blocks import BlockPool
from minilora.engine.request import Request
from minilora.lora.registry import AdapterVersion
from minilora.lora.slots import AdapterSlots

logger = logging.getLogger("minilora")

MAX_TIMES_PASSED = 16  # adapter requests that may overtake one that waits for a slot


@dataclass(frozen=True)
class ScheduledStep:
    """A step's batch, its requests in the batch's order, and those that failed on the way."""

    batch: Batch
    requests: tuple[Request, ...]
    failed: tuple[Request, ...]

    @property
    def sampling(self) -> list[Request]:
        """The requests whose next token is sampled after this step."""
        pairs = zip(self.requests, self.batch.rows, strict=True)
        return [request for request, row in pairs if row.samples]


class Scheduler:
    """Decide each step.

    Args:
        pool: the KV blocks.
        slots: the adapter slots, None without LoRA.
        max_num_seqs: the most requests in a step.
        max_num_batched_tokens: the most tokens in a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: AdapterSlots | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.pool, self.slots = pool, slots
        self._max_num_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request, which holds its adapter already."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request (finished, failed or aborted) and give back all that it holds."""
        adapter, slots = request.adapter, self.slots
        if request in self.running:
            self.running.remove(request)
            self._give_back(request)
            if adapter is not None and slots is not None:
                slots.stop(adapter)
        else:
            self.waiting.remove(request)
            if request.preempted and adapter is not None and slots is not None:
                slots.forget_suspended(adapter)
        if adapter is not None and slots is not None:
            slots.registry.release(adapter)

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    def holds(self, request: Request) -> bool:
        """Whether a request is running or waiting."""
        return request in self.running or request in self.waiting

    @property
    def could_admit(self) -> bool:
        """Whether a waiting request could start now; asks what `schedule` asks."""
        if len(self.running) == self._max_num_seqs:
            return False
        without_slot: set[AdapterVersion | None] = set()
        for request in self.waiting:
            if request.adapter not in without_slot:
                if self._has_slot(request):
                    return self.pool.blocks_for(request.num_tokens) <= self.pool.num_free
                without_slot.add(request.adapter)
        return False

    def extend_all(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> bool:
        """Let every request's blocks hold so many tokens, without preempting anybody.

        Returns:
            False, and nothing has changed, if too few blocks are free.
        """
        needs = list(zip(requests, num_tokens, strict=True))
        missing = sum(self.pool.blocks_for(count) - len(r.block_ids) for r, count in needs)
        if missing > self.pool.num_free:
            return False
        return all(self.pool.extend(request.block_ids, count) for request, count in needs)

    def schedule(self) -> ScheduledStep:
        """Choose the next step; every request in it has its KV blocks and its adapter slot."""
        plan = _Plan(self._max_tokens)
        preempted = self._continue_running(plan)
        if not preempted:  # who just gave up its blocks would only take them back
            self._admit_waiting(plan)
        return plan.step()

    def _continue_running(self, plan: _Plan) -> bool:
        """Plan the requests that run, oldest first; return whether one was preempted."""
        before = self.num_preemptions
        for request in list(self.running):
            # A preempted request comes after the one that needed its blocks, so it is not
            # planned yet; it only has to be left out.
            if plan.budget and request in self.running and self._make_room(request, plan.budget):
                plan.add(request)
        return self.num_preemptions > before

    def _make_room(self, request: Request, budget: int) -> bool:
        """Extend a request's blocks, preempting those admitted last; False if it was itself."""
        target = min(request.num_tokens, request.num_computed + budget)
        while not self.pool.extend(request.block_ids, target):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and slot; all its tokens are computed again later."""
        self.running.remove(request)
        self._give_back(request)
        if request.adapter is not None and self.slots is not None:
            self.slots.suspend(request.adapter)
        request.num_computed, request.preempted = 0, True
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.lora_slot = NO_LORA

    def _admit_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests in order of arrival, passing over those without a slot."""
        passed: list[Request] = []
        without_slot: set[AdapterVersion | None] = set()  # asked once: no slot frees in here
        held_back: AdapterVersion | None = None  # the adapter whose slot is reserved
        for request in list(self.waiting):
            if plan.budget == 0 or len(self.running) == self._max_num_seqs:
                return
            if request.adapter is not None and request.adapter is held_back:
                continue
            if request.adapter in without_slot or not self._has_slot(request):
                without_slot.add(request.adapter)
                passed.append(request)
                if held_back is None and request.times_passed >= MAX_TIMES_PASSED and self.slots:
                    held_back = self.slots.soonest_free()
                continue
            if self.pool.blocks_for(request.num_tokens) > self.pool.num_free:
                return  # blocks go in order of arrival, or a long prompt would never get enough
            if self._start(request, plan):
                plan.add(request)
                _count_passed(passed, request)

    def _has_slot(self, request: Request) -> bool:
        adapter, slots = request.adapter, self.slots
        return adapter is None or slots is None or slots.has_room_for(adapter)

    def _start(self, request: Request, plan: _Plan) -> bool:
        """Give a waiting request its slot and blocks; False if its adapter cannot be had."""
        if request.adapter is not None and self.slots is not None:
            try:
                slot = self.slots.start(request.adapter, request.preempted)
            except Exception as error:  # of this request only, whatever it is
                logger.warning("request %s failed: %s", request.request_id, error)
                request.fail(str(error) or type(error).__name__)
                plan.failed.append(request)
                return False
            if slot is None:
                return False
            request.lora_slot, request.preempted = slot, False
        # All blocks of the prompt at once: its later chunks then never wait for any.
        self.pool.extend(request.block_ids, request.num_tokens)
        self.waiting.remove(request)
        self.running.append(request)
        return True


@dataclass
class _Plan:
    """A step in the making: what is left of the budget, and how many tokens each request has."""

    budget: int
    counts: dict[Request, int] = field(default_factory=dict)
    failed: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        count = min(request.num_tokens - request.num_computed, self.budget)
        self.counts[request] = count
        self.budget -= count

    def step(self) -> ScheduledStep:
        """Order requests as `Batch` wants them (one token first) and list their rows."""
        requests = sorted(self.counts, key=lambda request: self.counts[request] != 1)
        rows = tuple(_row(request, self.counts[request]) for request in requests)
        return ScheduledStep(Batch(rows), tuple(requests), tuple(self.failed))


def _row(request: Request, count: int) -> BatchRow:
    start = request.num_computed
    return BatchRow(
        token_ids=request.tokens(start, count),
        start=start,
        block_ids=request.block_ids,
        lora_slot=request.lora_slot,
        samples=start + count == request.num_tokens,
    )


def _count_passed(passed: list[Request], admitted: Request) -> None:
    """Count an overtaking; a base request takes no slot, so it does not delay those passed."""
    if admitted.adapter is not None:
        for request in passed:
            request.times_passed += 1
