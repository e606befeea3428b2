"""Random arrivals, aborts, loads and unloads: no leak, no starvation, no wrong adapter.

The signature checkpoint tells by the token which adapter served a row, and the "v" adapters
stamp the KV cache, so a block that is reused too early shows as well.
"""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minilora import LLM, AdapterError, LoRARequest, SamplingParams

NAMES = st.sampled_from(["a", "b", "c", "d"])
SIGNS = st.sampled_from(["down-1", "down-7", "down-9", "v-2", "v-5", "v-11"])
ZOO: Any = None  # set by the fixture below; a state machine takes no fixtures
MOST_STEPS = 3000  # a bound on how long anything may wait


class EngineMachine(RuleBasedStateMachine):
    """Drive one engine; `expected` is what each request must answer."""

    @initialize(
        max_loras=st.integers(1, 3),
        host=st.none() | st.integers(0, 2),
        num_seqs=st.sampled_from([1, 3, 8]),
        budget=st.sampled_from([8, 11, 64]),
        blocks=st.sampled_from([10, 17, 64]),
        ahead=st.booleans(),
    )
    def begin(
        self,
        max_loras: int,
        host: int | None,
        num_seqs: int,
        budget: int,
        blocks: int,
        ahead: bool,
    ) -> None:
        self.llm = LLM(
            ZOO.model,
            enable_lora=True,
            max_loras=max_loras,
            max_cpu_loras=None if host is None else max_loras + host,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(budget, num_seqs),
            num_kv_blocks=blocks,
            block_size=4,
            device="cpu",
            async_scheduling=ahead,
        )
        self.expected: dict[str, tuple[int | None, int, int]] = {}
        self.signs: dict[str, str] = {}
        self.finished = self.aborted = 0

    def arrive(self, name: str | None, length: int, max_tokens: int, n: int = 1) -> None:
        """Queue one request; the model's context bounds what it can generate."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=True)
        lora = None if name is None else LoRARequest(name)
        request = self.llm.add_request([2] * (length - 1) + [3], params, lora)
        token = None if name is None else int(self.signs[name].split("-")[1])
        room = min(max_tokens, self.llm.max_model_len - length)
        self.expected[request] = (token, room, n)

    @rule(length=st.integers(1, 30), max_tokens=st.integers(1, 12), n=st.integers(1, 3))
    def arrive_base(self, length: int, max_tokens: int, n: int) -> None:
        self.arrive(None, length, max_tokens, n)

    @precondition(lambda self: self.signs)
    @rule(data=st.data(), length=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def arrive_adapter(self, data: Any, length: int, max_tokens: int) -> None:
        self.arrive(data.draw(st.sampled_from(sorted(self.signs))), length, max_tokens)

    @rule(name=NAMES, sign=SIGNS)
    def load(self, name: str, sign: str) -> None:
        self.llm.load_adapter(name, ZOO(sign))
        self.signs[name] = sign

    @precondition(lambda self: self.signs)
    @rule(data=st.data())
    def unload(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.signs)))
        del self.signs[name]
        try:
            self.llm.unload_adapter(name, timeout=0)
        except TimeoutError:
            assert self.llm.has_unfinished_requests()

    @precondition(lambda self: self.signs)
    @rule(data=st.data(), pin=st.booleans())
    def pin(self, data: Any, pin: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.signs)))
        with contextlib.suppress(AdapterError):  # no slot for it just now
            (self.llm.pin_adapter if pin else self.llm.unpin_adapter)(name)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request = data.draw(st.sampled_from(sorted(self.expected)))
        self.llm.abort(request)
        self.expected.pop(request)

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        for output in self.llm.step():
            token, room, n = self.expected.pop(output.request_id)
            assert len(output.outputs) == n
            for answer in output.outputs:
                assert answer.finish_reason == "length", answer.error
                want = [token] * room if token is not None else [(4 + i) % 32 for i in range(room)]
                assert answer.token_ids == want

    @invariant()
    def blocks_and_slots_add_up(self) -> None:
        if not hasattr(self, "llm"):
            return
        scheduler, slots = self.llm.scheduler, self.llm._slots
        owned = [block for request in scheduler.running for block in request.block_ids]
        assert len(set(owned)) == len(owned), "two requests own one block"
        assert 0 not in owned, "the padding block is owned"
        assert scheduler.pool.num_free + len(owned) == scheduler.pool.num_blocks
        assert not any(request.block_ids for request in scheduler.waiting)
        for request in scheduler.running:
            if request.adapter is not None:
                assert slots._slots[request.lora_slot] is request.adapter

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        for _ in range(MOST_STEPS):
            if not self.llm.has_unfinished_requests():
                break
            self.step()
        assert not self.expected, "a request starved"
        assert self.llm.scheduler.pool.num_free == self.llm.scheduler.pool.num_blocks
        for name in list(self.signs):
            self.llm.unload_adapter(name, timeout=0)
        assert self.llm._slots.resident == []
        assert not self.llm._slots.registry._held


def test_engine_under_random_traffic(zoo: Any) -> None:
    global ZOO
    ZOO = zoo
    run = EngineMachine.TestCase()
    run.settings = settings(
        max_examples=40,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run.runTest()
