"""`Request`: one prompt being answered, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minilora.batch import NO_LORA
from minilora.config.sampling import SamplingParams
from minilora.engine.detokenizer import Detokenizer
from minilora.engine.sampler import Logprob
from minilora.lora.registry import AdapterVersion


@dataclass(eq=False)
class Request:
    """One answer to one prompt (``n`` answers are ``n`` requests).

    Attributes:
        index: which of the prompt's answers this is.
        num_computed: tokens whose keys and values are in the cache.
        block_ids: its KV blocks.
        lora_slot: its adapter's slot while it runs.
        preempted: it ran before and gave up its blocks; it waits to be computed again.
        times_passed: requests that were admitted before it although they came later.
        finish_reason: "stop", "length", "abort" or "error"; None while it is not finished.
        stop_reason: the stop string or token that ended it, as in vLLM.
        error: the sentence that says why it failed.
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: AdapterVersion | None = field(repr=False)
    rng: np.random.Generator = field(repr=False)
    end_token_ids: frozenset[int]
    detokenizer: Detokenizer | None = field(default=None, repr=False)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    lora_slot: int = NO_LORA
    preempted: bool = False
    times_passed: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer so far; empty without a tokenizer."""
        return self.detokenizer.text if self.detokenizer else ""

    def tokens(self, start: int, count: int) -> list[int]:
        """Return `count` tokens of prompt and answer, from `start` on."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : start - prompt + count]
        head = self.prompt_token_ids[start : start + count]
        return head + self.output_token_ids[: count - len(head)]

    def fail(self, error: str) -> None:
        """End with an error; the others go on."""
        self.error = error
        self.finish_reason = "error"  # last: whoever sees it, in any thread, sees the rest

    def banned_token_ids(self) -> list[int]:
        """Return the tokens that must not be sampled now: end tokens before `min_tokens`."""
        if len(self.output_token_ids) >= self.params.min_tokens:
            return []
        return sorted(self.end_token_ids | set(self.params.stop_token_ids or ()))
