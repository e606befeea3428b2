"""The engine on the signature checkpoint, where a wrong adapter is a wrong token.

The letters and numbers in the test names are those of the public fault reports in docs/.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from minilora import LLM, AdapterError, LoRARequest, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
BASE = [3, 9, 4]  # a prompt; the base model goes on with 5, 6, 7, ...


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture
def make_llm(zoo: Any, device: str) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults = {"enable_lora": True, "num_kv_blocks": 64, "max_num_seqs": 16}
        llm = LLM(zoo.model, device=device, dtype="float32", **{**defaults, **options})
        executed = llm.runner.execute

        def checked(batch: Any) -> Any:
            assert batch.num_real_loras <= llm.config.max_loras
            assert batch.num_tokens <= llm.config.max_num_batched_tokens
            return executed(batch)

        llm.runner.execute = checked  # type: ignore[method-assign]
        return llm

    return make


def assert_nothing_held(llm: LLM) -> None:
    """Every block is free and no adapter has a user."""
    assert not llm.has_unfinished_requests()
    pool = llm.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not llm.scheduler.has_requests
    assert all(info.num_users == 0 for info in llm.list_adapters())
    assert all(version.running == 0 for version in llm._slots.resident)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_base_and_adapters_in_one_batch(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    requests = [
        LoRARequest("down-7", zoo("down-7")),
        None,
        LoRARequest("v-3", zoo("v-3")),
        LoRARequest("down-9", zoo("down-9", rank=8)),
    ]
    outputs = llm.generate([BASE] * 4, GREEDY, requests)
    assert tokens(outputs) == [[7] * 4, [5, 6, 7, 8], [3] * 4, [9] * 4]
    assert [output.adapter for output in outputs] == ["down-7", None, "v-3", "down-9"]
    assert_nothing_held(llm)


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("budget", [2048, 16])
def test_s2_more_adapters_than_slots(make_llm: Any, zoo: Any, max_loras: int, budget: int) -> None:
    llm = make_llm(max_loras=max_loras, max_num_batched_tokens=budget)
    names = ["down-1", "down-2", "down-3", "down-7", "down-9", "down-12", None] * 2
    requests = [name and LoRARequest(name, zoo(name)) for name in names]
    prompt = [3] * 20 + [4]  # more than a step's tokens with the small budget
    outputs = llm.generate([prompt] * 14, GREEDY, requests)
    for name, output in zip(names, outputs, strict=True):
        want = [int(name.split("-")[1])] * 4 if name else [5, 6, 7, 8]
        assert output.token_ids == want, name
    assert_nothing_held(llm)


def test_s6_no_head_of_line_blocking_and_no_starvation(make_llm: Any, zoo: Any) -> None:
    llm = make_llm(max_loras=1, num_kv_blocks=256)
    a, b = LoRARequest("a", zoo("down-7")), LoRARequest("b", zoo("down-9"))
    ended: list[str] = []
    names = {
        llm.add_request(BASE, greedy(200), a): "long a",
        llm.add_request(BASE, greedy(4), b): "b",
        llm.add_request(BASE, greedy(4)): "base",
        llm.add_request(BASE, greedy(4), a): "second a",
    }
    step = 0
    while llm.has_unfinished_requests():
        step += 1
        if step < 600:  # requests for a keep arriving
            names[llm.add_request(BASE, greedy(3), a)] = "more a"
        for output in llm.step():
            ended.append(names[output.request_id])
            want = 9 if names[output.request_id] == "b" else 7
            if output.adapter:
                assert set(output.token_ids) == {want}
    assert ended.index("base") < ended.index("long a")
    assert ended.index("second a") < ended.index("long a")
    assert ended.index("b") < 300, "b waited for ever while others overtook it"
    assert_nothing_held(llm)


def test_s7_load_use_unload_fifty_times(make_llm: Any, zoo: Any) -> None:
    llm = make_llm(max_loras=2)
    for cycle in range(50):
        name = f"name{cycle}"
        token = cycle % 3 + 7
        llm.load_adapter(name, zoo(f"down-{token}"))
        assert llm.generate([BASE], GREEDY, LoRARequest(name))[0].token_ids == [token] * 4
        llm.unload_adapter(name, timeout=5)
        assert llm._slots.resident == []
    assert llm.list_adapters() == []
    assert_nothing_held(llm)


def test_s8_abort_and_n_release_the_adapter(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    lora = LoRARequest("a", zoo("down-7"))
    running = llm.add_request(BASE, greedy(1000), lora)
    llm.step()
    llm.abort(running)
    with pytest.raises(RequestError, match="max_model_len"):
        llm.add_request([1] * 5000, GREEDY, lora)
    assert tokens_of_all(llm.generate([BASE], greedy(4, n=4), lora)[0]) == [[7] * 4] * 4
    start = time.monotonic()
    llm.unload_adapter("a", timeout=5)
    assert time.monotonic() - start < 5
    assert_nothing_held(llm)


def tokens_of_all(output: Any) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def test_s8_two_threads_load_the_same_name(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    lora = LoRARequest("a", zoo("down-7"))
    results: list[list[int]] = []

    def ask() -> None:
        results.append(llm.generate([BASE], GREEDY, lora)[0].token_ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [[7] * 4] * 4
    assert llm._slots.num_swaps == 1
    assert_nothing_held(llm)


def test_unload_serves_running_requests_and_times_out_clearly(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    lora = LoRARequest("a", zoo("down-7"))
    stream = llm.stream([BASE], greedy(6), lora)
    first = next(stream)
    llm.unload_adapter("a")
    pieces = [first, *stream]
    assert [token for event in pieces for token in event.token_ids] == [7] * 6
    with pytest.raises(AdapterError, match="'a' is not loaded"):
        llm.generate([BASE], GREEDY, LoRARequest("a"))

    llm.load_adapter("b", zoo("down-9"))
    request = llm.add_request(BASE, greedy(500), LoRARequest("b"))
    with pytest.raises(TimeoutError, match=r"'b' is still used by 1 requests after 0 s"):
        llm.unload_adapter("b", timeout=0)
    llm.abort(request)
    assert llm.list_adapters() == []
    assert_nothing_held(llm)


def test_reload_under_the_same_name_while_it_runs(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    llm.load_adapter("a", zoo("down-7"))
    old = llm.stream([BASE], greedy(8), LoRARequest("a"))
    seen = next(old).token_ids
    llm.load_adapter("a", zoo("down-9"))
    assert llm.generate([BASE], GREEDY, LoRARequest("a"))[0].token_ids == [9] * 4
    seen += [token for event in old for token in event.token_ids]
    assert seen == [7] * 8, "a running request finishes on its own version"
    assert len(llm._slots.resident) == 1
    assert_nothing_held(llm)


def test_another_path_is_a_reload(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    for token in (7, 9, 7):
        lora = LoRARequest("a", zoo(f"down-{token}"))
        assert llm.generate([BASE], GREEDY, lora)[0].token_ids == [token] * 4
    assert len(llm.list_adapters()) == 1


def test_u2_one_bad_adapter_fails_its_caller_only(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    stream = llm.stream([BASE, BASE], greedy(6), [LoRARequest("a", zoo("down-7")), None])
    events = [next(stream)]
    with pytest.raises(AdapterError, match=r"'gone'.*no/such/folder"):
        llm.generate([BASE], GREEDY, LoRARequest("gone", "no/such/folder"))
    with pytest.raises(AdapterError, match="'gone'"):
        llm.load_adapter("gone", "no/such/folder")
    events += list(stream)
    got: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        got[event.prompt_index] += event.token_ids
    assert got == {0: [7] * 6, 1: [5, 6, 7, 8, 9, 10]}
    assert_nothing_held(llm)


def test_u3_rank_over_the_limit_says_all_four_things(make_llm: Any, zoo: Any) -> None:
    llm = make_llm(max_lora_rank=16)
    with pytest.raises(AdapterError) as error:
        llm.load_adapter("big", zoo("down-7", rank=64))
    for part in ("64", "16", "max_lora_rank", "'big'"):
        assert part in str(error.value)
    assert llm.generate([BASE], GREEDY)[0].token_ids == [5, 6, 7, 8]


def test_g4_an_adapter_loaded_after_the_first_request(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    assert llm.generate([BASE], GREEDY)[0].token_ids == [5, 6, 7, 8]
    lora = LoRARequest("a", zoo("down-7"))
    assert llm.generate([BASE], GREEDY, lora)[0].token_ids == [7] * 4


def test_m4_several_end_tokens(make_llm: Any, zoo: Any, tmp_path: Any) -> None:
    from minilora.testing import make_signature_llama

    folder = make_signature_llama(tmp_path / "ends", eos_token_id=[30, 7])
    llm = LLM(folder, enable_lora=True, num_kv_blocks=64)
    lora = LoRARequest("a", zoo("down-7"))
    stop = llm.generate([BASE], SamplingParams(temperature=0, max_tokens=5), lora)[0]
    assert (stop.token_ids, stop.finish_reason) == ([7], "stop")
    on = llm.generate([BASE], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), lora)[0]
    assert (on.token_ids, on.finish_reason) == ([7] * 5, "length")
    late = SamplingParams(temperature=0, max_tokens=5, min_tokens=3)
    output = llm.generate([BASE], late, lora)[0]
    assert 7 not in output.token_ids[:3], "no end token before min_tokens"
    assert (len(output.token_ids), output.finish_reason) == (4, "stop")


def test_stop_token_ids(make_llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[7])
    output = make_llm().generate([BASE], params)[0]
    assert output.token_ids == [5, 6, 7]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", 7)


def test_m5_a_seeded_row_is_not_moved_by_its_neighbours(make_llm: Any) -> None:
    llm = make_llm()
    hot = SamplingParams(temperature=30.0, seed=5, max_tokens=12, ignore_eos=True)
    alone = llm.generate([BASE], hot)[0].token_ids
    assert len(set(alone)) > 3, "the temperature makes it vary"
    noise = SamplingParams(temperature=30.0, top_k=3, repetition_penalty=1.3, max_tokens=12)
    mixed = llm.generate([BASE] * 4, [greedy(12), hot, noise, hot])
    assert mixed[1].token_ids == alone == mixed[3].token_ids
    assert mixed[0].token_ids == list(range(5, 17))


def test_n_answers_of_a_seed_differ_and_repeat(make_llm: Any) -> None:
    llm = make_llm()
    params = SamplingParams(temperature=30.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    first, again = llm.generate([BASE, BASE], params)
    assert tokens_of_all(first) == tokens_of_all(again)
    assert len({tuple(answer) for answer in tokens_of_all(first)}) == 3
    assert [answer.index for answer in first.outputs] == [0, 1, 2]


@pytest.mark.parametrize("length", [31, 32, 33])
def test_m6_a_prompt_of_whole_blocks_twice_and_at_once(make_llm: Any, length: int) -> None:
    llm = make_llm()
    prompt = [3] * (length - 1) + [4]
    for prompts in ([prompt], [prompt], [prompt, prompt]):
        assert tokens(llm.generate(prompts, GREEDY)) == [[5, 6, 7, 8]] * len(prompts)


def test_m7_requests_that_can_never_fit(make_llm: Any) -> None:
    llm = make_llm(max_model_len=64)
    assert tokens(llm.generate([[4] * 63], greedy(10))) == [[5]]
    for length, words in ((64, "64 tokens"), (65, "65 tokens"), (0, "empty")):
        with pytest.raises(RequestError, match=words):
            llm.generate([[4] * length], GREEDY)
    small = make_llm(num_kv_blocks=3, max_model_len=None)
    assert small.max_model_len == 48
    with pytest.raises(RequestError, match=r"160 tokens; max_model_len=48"):
        small.generate([[4] * 160, BASE], GREEDY)
    assert tokens(small.generate([BASE], GREEDY)) == [[5, 6, 7, 8]]
    assert_nothing_held(small)


def test_m9_preemption_changes_no_token(make_llm: Any, zoo: Any) -> None:
    names = ["down-7", None, "v-3", "down-9", None, "down-7", "v-3", None]
    requests = [name and LoRARequest(name, zoo(name)) for name in names]
    prompts = [[3 + i] * (5 + i) + [4] for i in range(8)]
    params = greedy(25)
    large = make_llm(num_kv_blocks=128, block_size=4)
    small = make_llm(num_kv_blocks=12, block_size=4)
    want = tokens(large.generate(prompts, params, requests))
    got = tokens(small.generate(prompts, params, requests))
    assert large.scheduler.num_preemptions == 0
    assert small.scheduler.num_preemptions > 0
    assert got == want
    assert all(len(answer) == 25 for answer in got)
    assert_nothing_held(small)


def test_a_random_row_survives_preemption(make_llm: Any) -> None:
    params = [
        SamplingParams(temperature=30.0, seed=i, max_tokens=24, ignore_eos=True) for i in range(6)
    ]
    want = make_llm(num_kv_blocks=64, block_size=4).generate([BASE] * 6, params)
    small = make_llm(num_kv_blocks=10, block_size=4)
    assert tokens(small.generate([BASE] * 6, params)) == tokens(want)
    assert small.scheduler.num_preemptions > 0


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 9, 12, 17, 20])
def test_g7_every_batch_size(make_llm: Any, zoo: Any, max_num_seqs: int) -> None:
    llm = make_llm(max_num_seqs=max_num_seqs)
    loras = [None, LoRARequest("a", zoo("down-7")), LoRARequest("b", zoo("v-3"))]
    requests = [loras[i % 3] for i in range(max_num_seqs)]
    want = [[5, 6, 7, 8], [7] * 4, [3] * 4]
    outputs = llm.generate([BASE] * max_num_seqs, GREEDY, requests)
    assert tokens(outputs) == [want[i % 3] for i in range(max_num_seqs)]


@pytest.mark.parametrize("specialize", [True, False])
def test_specialize_flags_size_the_grid(make_llm: Any, zoo: Any, specialize: bool) -> None:
    flags = {"specialize_lora": specialize, "specialize_active_lora": specialize}
    llm = make_llm(**flags, max_loras=3, graph="none")
    grids: list[int] = []
    prepare = llm.runner.prepare

    def spy(batch: Any) -> Any:
        key, step = prepare(batch)
        grids.append(step.num_active_loras)
        return key, step

    llm.runner.prepare = spy
    assert llm.generate([BASE], greedy(2))[0].token_ids == [5, 6]
    lora = LoRARequest("a", zoo("down-7"))
    assert llm.generate([BASE], greedy(2), lora)[0].token_ids == [7, 7]
    assert grids == ([0, 0, 1, 1] if specialize else [3, 3, 3, 3])


def test_k5_logits_that_are_not_finite_fail_that_request(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    llm.load_adapter("bad", zoo("down-7"))
    llm.generate([BASE], greedy(1), LoRARequest("bad"))
    slot = llm.list_adapters()[0].lora_slot
    for layer in llm._slots.layers:
        for b_stacked in layer.lora_b_stacked:
            b_stacked[slot] = float("nan")
    outputs = llm.generate([BASE] * 3, GREEDY, [None, LoRARequest("bad"), None])
    assert outputs[1].finish_reason == "error"
    assert "adapter 'bad'" in outputs[1].error
    assert "finite" in outputs[1].error
    assert outputs[1].token_ids == []
    assert tokens(outputs[::2]) == [[5, 6, 7, 8]] * 2
    assert_nothing_held(llm)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(make_llm: Any) -> None:
    llm = make_llm()
    execute = llm.runner.execute

    def broken(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    llm.runner.execute = broken
    for output in llm.generate([BASE, BASE], GREEDY):
        assert output.finish_reason == "error"
        assert output.error == "the step failed: RuntimeError: out of memory"
    llm.runner.execute = execute
    assert tokens(llm.generate([BASE], GREEDY)) == [[5, 6, 7, 8]]
    assert_nothing_held(llm)


def test_stream_gives_every_token_once_and_closing_aborts(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    loras = [None, LoRARequest("a", zoo("down-7"))]
    events = list(llm.stream([BASE, BASE], GREEDY, loras))
    for prompt, want in enumerate([[5, 6, 7, 8], [7] * 4]):
        own = [event for event in events if event.prompt_index == prompt]
        assert [token for event in own for token in event.token_ids] == want
        assert [event.finish_reason for event in own] == [None, None, None, "length"]
    for started in (True, False):
        stream = llm.stream([BASE], greedy(500), loras[1])
        if started:
            next(stream)
        stream.close()
        assert_nothing_held(llm)


def test_abort_by_id(make_llm: Any) -> None:
    llm = make_llm()
    stream = llm.stream([BASE], greedy(500))
    first = next(stream)
    llm.abort(first.request_id)
    llm.abort("no such id")
    last = list(stream)[-1]
    assert last.finish_reason == "abort"
    assert_nothing_held(llm)


def test_generate_that_is_interrupted_leaves_nothing(make_llm: Any) -> None:
    llm = make_llm()
    plain, calls = llm.runner.execute, iter(range(3))

    def interrupted(batch: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return plain(batch)

    llm.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([BASE] * 3, greedy(100))
    llm.runner.execute = plain
    assert_nothing_held(llm)
    assert tokens(llm.generate([BASE], GREEDY)) == [[5, 6, 7, 8]]


def test_pinned_adapter_stays(make_llm: Any, zoo: Any) -> None:
    llm = make_llm(max_loras=2)
    for token in (7, 9, 12):
        llm.load_adapter(f"n{token}", zoo(f"down-{token}"))
    llm.pin_adapter("n7")
    for token in (9, 12, 9, 12):
        assert llm.generate([BASE], GREEDY, LoRARequest(f"n{token}"))[0].token_ids == [token] * 4
    assert llm.list_adapters()[1].name == "n7" or llm.list_adapters()[0].name
    pinned = [info for info in llm.list_adapters() if info.pinned]
    assert [(info.name, info.lora_slot is not None) for info in pinned] == [("n7", True)]
    assert llm._slots.num_swaps == 5


def test_an_event_keeps_what_it_said(make_llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    outputs = [event.output for event in make_llm().stream([[1, 2, 3]], params)]
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4]
    assert [len(output.logprobs) for output in outputs] == [1, 2, 3, 4]


def test_logprobs(make_llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    answer = make_llm().generate([BASE], params)[0].outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 3
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(entry) == 2
        assert entry[token].rank == 1
    total = sum(
        entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert answer.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([BASE, [1, 32]], {}, "prompt 1 holds the token id 32; this model has 0 to 31"),
        ([[-1]], {}, "token id -1"),
        ([[1.5]], {}, "1.5, which is no token id"),
        (["text"], {}, "no tokenizer.json; give token ids"),
        ([BASE, BASE], {"lora_request": [None]}, "lora_request has 1 entries for 2 prompts"),
        ([BASE], {"lora_request": "a"}, "must be None or a LoRARequest"),
        ([BASE], {"lora_request": LoRARequest("nobody")}, "'nobody' is not loaded"),
        (
            [BASE],
            {"sampling_params": SamplingParams(stop_token_ids=[99])},
            "stop_token_ids holds 99",
        ),
        ([BASE], {"sampling_params": SamplingParams(stop="x")}, "no tokenizer.json"),
    ],
)
def test_bad_requests_are_one_sentence_and_start_nothing(
    make_llm: Any, prompts: Any, options: Any, words: str
) -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match=words) as error:
        llm.generate(prompts, **options)
    assert "\n" not in str(error.value)
    assert_nothing_held(llm)
    assert tokens(llm.generate([BASE], GREEDY)) == [[5, 6, 7, 8]]


def test_lora_request_without_enable_lora(make_llm: Any, zoo: Any) -> None:
    llm = make_llm(enable_lora=False)
    with pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate([BASE], GREEDY, LoRARequest("a", zoo("down-7")))
    with pytest.raises(AdapterError, match="enable_lora=True"):
        llm.load_adapter("a", zoo("down-7"))
    assert tokens(llm.generate([BASE], GREEDY)) == [[5, 6, 7, 8]]


def test_a_single_list_of_token_ids_is_one_prompt(make_llm: Any) -> None:
    assert tokens(make_llm().generate(BASE, GREEDY)) == [[5, 6, 7, 8]]
    assert make_llm().generate([], GREEDY) == []
