"""`async_scheduling`: steps that are launched before the tokens before them are known.

The answers must be those of an engine that waits, token by token, whatever happens meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import Batch
from minilora.testing import StepChecker, poisoned

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_kv_blocks": 24,
    "block_size": 4,
}  # fmt: skip
PATHS: dict[str, dict[str, str]] = {
    "eager": {"graph": "none"},
    "graphs": {"graph": "recorded", "compile": "none"},
}


@pytest.fixture(params=PATHS)
def make(request: Any, tiny_llama: Path, device: str) -> Any:
    path = PATHS[request.param]
    if device == "cuda" and path["graph"] != "none":
        path = {"graph": "cuda"}

    def make(ahead: bool = True, **options: Any) -> LLM:
        lora = {"enable_lora": True, "max_loras": 2}
        options = {**SIZES, **lora, **path, "device": device, **options}
        return LLM(tiny_llama, async_scheduling=ahead, **options)

    return make


@pytest.fixture
def loras(tiny_adapter: Any) -> list[LoRARequest | None]:
    made = [LoRARequest(f"a{i}", str(tiny_adapter(f"a{i}", seed=i))) for i in range(3)]
    return [made[0], None, made[1], made[2], None, made[0], made[1]]


def steps_ahead(llm: LLM) -> int:
    assert llm.core.ahead is not None
    return llm.core.ahead.num_ahead


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


PROMPTS = [[3 + i, 40 + i, 7] * (1 + i % 3) for i in range(7)]
PARAMS: dict[str, list[SamplingParams]] = {
    "greedy": [greedy()] * 7,
    "lengths": [greedy(max_tokens=1 + 3 * i) for i in range(7)],
    "seeded": [SamplingParams(seed=i, max_tokens=9, top_k=40, top_p=0.9) for i in range(7)],
    "ends": [greedy(ignore_eos=False, stop_token_ids=list(range(3, 130))) for _ in range(7)],
    "stop strings": [greedy(stop=["a", "e", "t", "s"]) for _ in range(7)],
    "min tokens": [greedy(min_tokens=4, stop_token_ids=list(range(3, 200)))] * 7,
    "needs the host": [greedy(repetition_penalty=1.3), greedy(logprobs=2), *[greedy()] * 5],
    "a penalty": [greedy(repetition_penalty=1.3)] * 7,
    "log probabilities": [greedy(logprobs=2)] * 7,
    "as long as the model": [greedy(max_tokens=100)] * 7,
    "several answers": [SamplingParams(n=2, seed=5, max_tokens=6)] * 7,
}

NEVER_AHEAD = {"seeded", "a penalty", "log probabilities", "several answers"}


@pytest.mark.parametrize("name", PARAMS)
def test_the_answers_are_those_of_an_engine_that_waits(make: Any, loras: Any, name: str) -> None:
    want = make(ahead=False).generate(PROMPTS, PARAMS[name], loras, progress=False)
    llm = make()
    got = llm.generate(PROMPTS, PARAMS[name], loras, progress=False)
    assert [o.outputs for o in got] == [o.outputs for o in want]
    assert (steps_ahead(llm) > 0) == (name not in NEVER_AHEAD)
    assert_all_given_back(llm)


def assert_all_given_back(llm: LLM) -> None:
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.num_blocks
    assert not llm.scheduler.has_requests
    assert all(info.num_users == 0 for info in llm.list_adapters())


def test_nearly_every_decode_step_of_a_batch_is_launched_ahead(make: Any) -> None:
    llm = make()
    llm.generate(PROMPTS[:4], greedy(max_tokens=9), progress=False)
    assert steps_ahead(llm) == 8, "all but the first, which is the prefill"


def test_no_step_is_launched_beyond_the_model_s_length(make: Any) -> None:
    llm = make()
    output = llm.generate(PROMPTS[0], greedy(max_tokens=100), progress=False)[0]
    assert len(output.token_ids) == SIZES["max_model_len"] - len(PROMPTS[0])
    assert steps_ahead(llm) == len(output.token_ids) - 1


def test_a_full_batch_runs_ahead_though_others_wait(make: Any, loras: Any) -> None:
    llm = make()
    llm.generate(PROMPTS, greedy(max_tokens=20), progress=False)
    assert steps_ahead(llm) > 25


def test_a_request_that_comes_later_does_not_wait_for_the_end(make: Any) -> None:
    llm = make()
    llm.add_request(PROMPTS[0], greedy(max_tokens=30))
    for _ in range(3):
        llm.step()
    llm.add_request(PROMPTS[1], greedy())
    for _ in range(3):
        llm.step()
    assert len(llm.scheduler.running) == 2
    assert all(request.output_token_ids for request in llm.scheduler.running)


@pytest.mark.parametrize("blocks", [5, 6, 9])
def test_a_pool_that_is_too_small_for_all(make: Any, loras: Any, blocks: int) -> None:
    options = {"num_kv_blocks": blocks, "max_model_len": 20}
    params = greedy(max_tokens=11)
    prompts = [prompt[:3] for prompt in PROMPTS]
    want = make(ahead=False, **options).generate(prompts, params, loras, progress=False)
    llm = make(**options)
    got = llm.generate(prompts, params, loras, progress=False)
    assert [o.outputs for o in got] == [o.outputs for o in want]
    assert llm.scheduler.num_preemptions > 0
    assert_all_given_back(llm)


def test_traffic_that_comes_and_goes(make: Any, loras: Any) -> None:
    llm, names, outputs = make(), list[str](), list[Any]()
    params = [greedy(max_tokens=9 + i) for i in range(7)]
    for index, prompt in enumerate(PROMPTS):
        names.append(llm.add_request(prompt, params[index], loras[index]))
        for _ in range(1 + index % 3):
            outputs += llm.step()
        if index == 3:
            llm.abort(names[2])
    while llm.has_unfinished_requests():
        outputs += llm.step()
    want = make(ahead=False).generate(PROMPTS, params, loras, progress=False)
    found = {output.request_id: output.token_ids for output in outputs}
    expected = dict(zip(names, (output.token_ids for output in want), strict=True))
    del expected[names[2]]
    assert found == expected
    assert steps_ahead(llm) > 0
    assert_all_given_back(llm)


def test_a_stream_that_nobody_reads_any_more(make: Any) -> None:
    llm = make()
    stream = llm.stream(PROMPTS[0], greedy(max_tokens=30))
    for _ in range(3):
        next(stream)
    stream.close()
    want = make(ahead=False).generate(PROMPTS[1], greedy(), progress=False)
    assert llm.generate(PROMPTS[1], greedy(), progress=False)[0].outputs == want[0].outputs
    assert_all_given_back(llm)


def test_adapters_that_are_replaced_between_answers(make: Any, tiny_adapter: Any) -> None:
    llm, waits = make(max_loras=1), make(ahead=False, max_loras=1)
    for seed in range(3):
        path = str(tiny_adapter(f"version{seed}", seed=10 + seed))
        answers = [
            engine.generate(PROMPTS[:3], greedy(), LoRARequest("one", path), progress=False)
            for engine in (llm, waits)
        ]
        assert [o.outputs for o in answers[0]] == [o.outputs for o in answers[1]]


@pytest.fixture
def failing(make: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine whose fourth step fails."""
    llm = make()
    plain, calls = llm.runner.execute, list[Batch]()

    def execute(batch: Batch) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("out of luck")
        return plain(batch)

    monkeypatch.setattr(llm.runner, "execute", execute)
    return llm


def test_a_step_that_fails_keeps_the_tokens_before_it(failing: LLM) -> None:
    output = failing.generate(PROMPTS[0], greedy(), progress=False)[0].outputs[0]
    assert output.finish_reason == "error"
    assert "out of luck" in str(output.error)
    want = failing.generate(PROMPTS[0], greedy(), progress=False)[0]
    assert output.token_ids == want.token_ids[:3]
    assert_all_given_back(failing)


def test_logits_that_are_not_finite_end_their_request(make: Any) -> None:
    llm = make()
    plain, calls = llm.runner.execute, list[Batch]()

    def execute(batch: Batch) -> torch.Tensor:
        calls.append(batch)
        logits = plain(batch)
        if len(calls) == 3:
            logits = logits.clone()
            logits[0, 5] = float("nan")
        return logits

    llm.runner.execute = execute
    bad, good = llm.generate(PROMPTS[:2], greedy(), progress=False)
    assert bad.finish_reason == "error"
    assert len(bad.token_ids) == 2
    assert good.finish_reason == "length"
    assert_all_given_back(llm)


def test_poison_between_steps_changes_nothing(make: Any, loras: Any) -> None:
    want = make(ahead=False).generate(PROMPTS, greedy(), loras, progress=False)
    llm = make()
    with poisoned(llm):
        got = llm.generate(PROMPTS, greedy(), loras, progress=False)
    assert [o.outputs for o in got] == [o.outputs for o in want]


def test_the_checker_sees_every_step_whole(make: Any, loras: Any) -> None:
    llm = make()
    with StepChecker(llm) as checker:
        llm.generate(PROMPTS, greedy(), loras, progress=False)
    checker.assert_clean()
    assert steps_ahead(llm) == 0
    llm.generate(PROMPTS[:1], greedy(), progress=False)
    assert steps_ahead(llm) > 0


def to_the_end(llm: LLM) -> list[int]:
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs[0].token_ids


def test_a_checker_that_comes_and_goes_in_the_middle(make: Any) -> None:
    want = make(ahead=False).generate(PROMPTS[0], greedy(), progress=False)[0].token_ids
    llm = make()
    llm.add_request(PROMPTS[0], greedy())
    for _ in range(3):
        llm.step()
    with StepChecker(llm) as checker:
        for _ in range(3):
            llm.step()
    checker.assert_clean()
    assert to_the_end(llm) == want


@pytest.mark.parametrize("call", range(1, 8))
def test_an_exit_in_the_middle_of_a_step(make: Any, call: int) -> None:
    """Such as SystemExit of a signal handler: no token is lost or comes twice."""
    want = make(ahead=False).generate(PROMPTS[0], greedy(), progress=False)[0].token_ids
    llm, calls = make(), [0]
    plain = llm.core._read

    def read(launched: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise SystemExit
        return plain(launched)

    llm.core._read = read
    llm.add_request(PROMPTS[0], greedy())
    with pytest.raises(SystemExit):
        to_the_end(llm)
    assert to_the_end(llm) == want


def test_nothing_is_kept_when_the_engine_is_idle(make: Any) -> None:
    llm = make()
    params = greedy(stop_token_ids=list(range(3, 250)))
    llm.generate(PROMPTS[0], params, progress=False)
    assert llm.core.ahead.take() is None


def test_a_queue_that_waits_for_a_slot_does_not_stop_it(make: Any, loras: Any) -> None:
    llm = make(max_loras=1)
    llm.generate(PROMPTS[:2], greedy(), [loras[0], loras[2]], progress=False)
    assert steps_ahead(llm) > 18
