"""Prompts and answers as text: stop strings, streaming, chat, log probabilities with words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minilora import LLM, ConfigError, RequestError, SamplingParams
from minilora.testing import make_tiny_llama


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, num_kv_blocks=64, device="cpu")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": 24, **options})


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    output = llm.generate("Hello", params())[0]
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == llm.tokenizer.encode("Hello")


def test_a_stop_string_cuts_the_text_and_ends_the_answer(llm: LLM) -> None:
    whole = llm.generate("Hello", params())[0]
    stop = whole.text[5:8]
    first = whole.text.index(stop)
    output = llm.generate("Hello", params(stop=[stop, "never"]))[0]
    assert output.text == whole.text[:first]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < len(whole.token_ids)


def test_min_tokens_also_holds_back_stop_strings(llm: LLM) -> None:
    whole = llm.generate("Hello", params())[0]
    stop = whole.text[2:4]
    output = llm.generate("Hello", params(stop=stop, min_tokens=12))[0]
    assert len(output.token_ids) > 12 or output.finish_reason == "length"


def test_streamed_pieces_add_up_and_hold_no_stop_string(llm: LLM) -> None:
    whole = llm.generate("Hello", params())[0]
    stop = whole.text[10:13]
    want = llm.generate("Hello", params(stop=stop))[0].text
    events = list(llm.stream("Hello", params(stop=stop)))
    assert "".join(event.text for event in events) == want == events[-1].output.text
    assert events[-1].finish_reason == "stop"


def test_chat_uses_the_template(llm: LLM) -> None:
    assert llm.tokenizer is not None
    talk = [{"role": "user", "content": "Hi"}]
    single = llm.chat(talk, params())
    several = llm.chat([talk, talk], params())
    assert [output.token_ids for output in several] == [single[0].token_ids] * 2
    text = llm.tokenizer.apply_chat_template(talk)
    want = llm.tokenizer.encode(text, add_special_tokens=False)
    assert single[0].prompt_token_ids == want


def test_chat_without_template_or_tokenizer_says_so(tmp_path: Path) -> None:
    plain = make_tiny_llama(tmp_path / "plain", chat_template=False)
    with pytest.raises(ValueError, match="chat_template"):
        LLM(plain, num_kv_blocks=8).chat([{"role": "user", "content": "Hi"}])
    silent = make_tiny_llama(tmp_path / "silent", tokenizer=False)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        LLM(silent, num_kv_blocks=8).chat([{"role": "user", "content": "Hi"}])


def test_logprobs_carry_the_tokens_text(llm: LLM) -> None:
    answer = llm.generate("Hello", params(max_tokens=2, logprobs=2))[0].outputs[0]
    assert llm.tokenizer is not None
    assert answer.logprobs is not None
    for entry in answer.logprobs:
        for token, logprob in entry.items():
            assert logprob.decoded_token == llm.tokenizer.token_text(token)


def test_an_empty_text_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        llm.generate(["Hello", ""])


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    (model / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "eos_token_id": 2}'
    )
    llm = LLM(model, num_kv_blocks=8)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens) == (0.5, 0.9, 3)
    assert len(llm.generate("Hello")[0].token_ids) <= 3
    (model / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="top_p=7"):
        LLM(model, num_kv_blocks=8)
