"""What a user gets back: `RequestOutput`, `CompletionOutput`, `StreamEvent` (names as in vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minilora.engine.request import Request
from minilora.engine.sampler import Logprob


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the prompt's `n` answers.
        text: the answer, without end tokens and stop strings; "" without a tokenizer.
        token_ids: every generated token, the end token included.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token that ended it; None for an end token.
        logprobs: one dict a token (token id -> `Logprob`), if they were asked for.
        cumulative_logprob: sum over the sampled tokens, if they were asked for.
        error: why it failed, one sentence; None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt. `text`, `token_ids`, `finish_reason` are those of the first.

    Attributes:
        request_id: as `LLM.abort` takes it.
        prompt: the prompt's text, None where token ids were given.
        adapter: name of the adapter that answered, None for the base model.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    adapter: str | None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        """Why the first answer failed; None where it did not."""
        return self.outputs[0].error


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to one answer.

    Attributes:
        prompt_index: which of the prompts given to `LLM.stream`.
        index: which of the prompt's `n` answers.
        text: the new piece of text; the pieces add up to the final text.
        token_ids: the new tokens.
        finish_reason: set in the answer's last event.
        output: the whole answer so far.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    output: CompletionOutput


def completion(request: Request) -> CompletionOutput:
    """Return a request's answer so far."""
    return CompletionOutput(
        index=request.index,
        text=request.text,
        token_ids=list(request.output_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=None if request.logprobs is None else list(request.logprobs),
        cumulative_logprob=request.cumulative_logprob,
        error=request.error,
    )


def request_output(answers: Sequence[Request]) -> RequestOutput:
    """Join the answers to one prompt."""
    first = answers[0]
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[completion(answer) for answer in answers],
        adapter=first.adapter.name if first.adapter else None,
    )
