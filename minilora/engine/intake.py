"""Turn what a user asks for into `Request`s, or say in one sentence why it cannot be served."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from minilora.config.errors import RequestError, shown
from minilora.config.lora import LoRARequest
from minilora.config.model import ModelConfig
from minilora.config.sampling import SamplingParams
from minilora.engine.detokenizer import Detokenizer
from minilora.engine.request import Request
from minilora.engine.sampler import make_rng
from minilora.engine.tokenizer import Tokenizer
from minilora.lora.registry import AdapterVersion, ReadAdapter
from minilora.lora.slots import AdapterSlots

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What one prompt asks for, checked; `read`: the folder of its adapter, if it is a new one."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    lora_request: LoRARequest | None
    read: ReadAdapter | None = None


class Intake:
    """Check prompts, parameters and adapters against the model, and make requests of them.

    Args:
        config: the model.
        tokenizer: None where the checkpoint has none; prompts are then token ids.
        slots: None without LoRA.
        max_model_len: the most tokens of prompt and answer together.
        seed: of the engine, for requests that bring none.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        slots: AdapterSlots | None,
        *,
        max_model_len: int,
        seed: int,
    ) -> None:
        self._config, self._tokenizer, self._slots = config, tokenizer, slots
        self._max_model_len, self._seed = max_model_len, seed
        self._serial = itertools.count()

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        where: str = "the prompt",
    ) -> Asked:
        """Check what one prompt asks for; `where` names it in an error. No adapter is read.

        Raises:
            RequestError: a prompt or parameter that this model cannot serve.
            AdapterError: the name of an adapter that is not loaded, without its folder.
        """
        text, token_ids = self._tokens(prompt, where)
        self._check_length(token_ids, where)
        self._check_params(params)
        self._check_adapter(lora_request)
        return Asked(text, token_ids, params, lora_request)

    def load(self, asked: Sequence[Asked]) -> list[Asked]:
        """Read the adapters of some prompts, each folder once, while others are served.

        Raises:
            AdapterError: a faulty adapter; no other one was replaced.
        """
        read: dict[tuple[str, str], ReadAdapter | None] = {}
        loaded = []
        for one in asked:
            request, found = one.lora_request, None
            if request is not None and request.path is not None and self._slots is not None:
                key = request.name, request.path
                if key not in read:
                    read[key] = self._slots.registry.prepare(*key)
                found = read[key]
            loaded.append(replace(one, read=found))
        return loaded

    def make(self, asked: Sequence[Asked], groups: list[list[Request]]) -> None:
        """Add the requests of each prompt to `groups`; if one fails, none is left there.

        Raises:
            AdapterError: an unknown or faulty adapter.
        """
        try:
            for one in asked:
                groups.append(self.requests(one))
        except BaseException:
            self.give_back([request for group in groups for request in group])
            groups.clear()
            raise

    def requests(self, asked: Asked) -> list[Request]:
        """Make the `n` requests of one prompt.

        Each holds its adapter until the scheduler removes it, or `give_back` lets it go.

        Raises:
            AdapterError: an unknown or faulty adapter.
        """
        adapter = self._hold(asked)
        try:
            return self._requests_of(asked, adapter)
        except BaseException:
            if adapter is not None and self._slots is not None:
                self._slots.registry.release(adapter, asked.params.n)
            raise

    def _requests_of(self, asked: Asked, adapter: AdapterVersion | None) -> list[Request]:
        params, token_ids = asked.params, asked.token_ids
        serial = next(self._serial)
        ends = frozenset(() if params.ignore_eos else self._config.eos_token_ids)
        return [
            Request(
                request_id=str(serial),
                index=index,
                prompt=asked.text,
                prompt_token_ids=token_ids,
                params=params,
                adapter=adapter,
                rng=self._rng(params, serial, index),
                end_token_ids=ends,
                detokenizer=Detokenizer(self._tokenizer, params.stop_strings, token_ids)
                if self._tokenizer
                else None,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            for index in range(params.n)
        ]

    def _rng(self, params: SamplingParams, serial: int, index: int) -> np.random.Generator:
        if params.seed is not None:
            return make_rng(params.seed + index)
        return make_rng((self._seed, serial, index))

    def _tokens(self, prompt: Any, where: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:  # also where the tokenizer would add a first token
                raise RequestError(f"{where} is empty; give at least one token")
            if self._tokenizer is None:
                raise RequestError(
                    f"{where} is text, but the checkpoint has no tokenizer.json; give token ids"
                )
            return prompt, self._in_vocabulary(self._tokenizer.encode(prompt), where)
        listed = isinstance(prompt, Sequence) or (isinstance(prompt, np.ndarray) and prompt.ndim)
        if isinstance(prompt, bytes) or not listed:
            raise RequestError(f"{where} is a {type(prompt).__name__}; give a text or token ids")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise RequestError(f"{where} holds {shown(token)}, which is no token id")
        return None, self._in_vocabulary([int(token) for token in prompt], where)

    def _in_vocabulary(self, token_ids: list[int], where: str) -> list[int]:
        vocab = self._config.vocab_size
        for token in token_ids:  # a tokenizer may know tokens that the model lacks, too
            if not 0 <= token < vocab:
                raise RequestError(
                    f"{where} holds the token id {shown(token)}; this model has 0 to {vocab - 1}"
                )
        return token_ids

    def _check_length(self, token_ids: list[int], where: str) -> None:
        if not token_ids:
            raise RequestError(f"{where} is empty; give at least one token")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"{where} has {len(token_ids)} tokens; max_model_len={self._max_model_len} leaves "
                f"room for {self._max_model_len - 1} and one more to generate"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={shown(params)} must be SamplingParams")
        vocab = self._config.vocab_size
        for token in params.stop_token_ids or ():
            if token >= vocab:
                raise RequestError(
                    f"stop_token_ids holds {token}; this model has token ids 0 to {vocab - 1}"
                )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                f"stop={params.stop!r} needs text, but the checkpoint has no tokenizer.json; "
                "use stop_token_ids"
            )

    def give_back(self, requests: Sequence[Request]) -> None:
        """Let go of the adapters of requests that will not be queued."""
        for request in requests:
            if request.adapter is not None and self._slots is not None:
                self._slots.registry.release(request.adapter)

    def _hold(self, asked: Asked) -> AdapterVersion | None:
        request = asked.lora_request
        if request is None or self._slots is None:
            return None
        return self._slots.registry.hold(request.name, request.path, asked.params.n, asked.read)

    def _check_adapter(self, lora_request: LoRARequest | None) -> None:
        if lora_request is None:
            return
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(
                f"lora_request={lora_request!r} must be None or a LoRARequest(name, path)"
            )
        if self._slots is None:
            raise RequestError(
                f"lora_request asks for adapter {lora_request.name!r}, but the engine was built "
                "without adapters; use enable_lora=True, or --lora NAME=DIR on the command line"
            )
        if lora_request.path is None:
            self._slots.registry.get(lora_request.name)


def as_prompts(prompts: Any) -> list[Prompt]:
    """Return a list of prompts from one text, one list of token ids, or a sequence of these."""
    if isinstance(prompts, (str, bytes)):
        return [prompts]
    wrong = f"prompts={shown(prompts)} must be a text, token ids, or a list of these"
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(wrong)
    try:
        prompts = list(prompts)
    except TypeError:  # an array without dimensions says that it can be iterated
        raise RequestError(wrong) from None
    numbers = [isinstance(item, (int, np.integer)) for item in prompts]
    return [prompts] if prompts and all(numbers) else prompts


def as_conversations(messages: Any) -> list[Any]:
    """Return a list of conversations from one, a list of messages, or a sequence of these."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f'messages={shown(messages)} must be a list like [{{"role": "user", "content": "Hi"}}]'
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def one_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    """Spread one value over all prompts, or check that a list has one a prompt.

    Raises:
        RequestError: the list has another length.
    """
    if not isinstance(given, (list, tuple)):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise RequestError(f"{name} has {len(given)} entries for {count} prompts; give one each")
    return list(given)
