"""Append a sampled token to its request, and decide whether the answer ends with it."""

from __future__ import annotations

import dataclasses

from minilora.engine.request import Request
from minilora.engine.sampler import Logprob, SampledToken


def commit_token(request: Request, token: SampledToken, max_model_len: int) -> None:
    """Append `token`, update text and log probabilities, and set `finish_reason` at the end.

    A row of logits that was not finite fails the request; it is never token 0.
    """
    if not token.finite:
        by = f"adapter {request.adapter.name!r}" if request.adapter else "the base model"
        fail(request, f"{by} gave logits that are not finite (NaN or infinite); no token is chosen")
        return
    request.output_token_ids.append(token.token_id)
    _keep_logprobs(request, token)
    if not _ends_with_token(request, token.token_id):
        _push_text(request, token.token_id)
        length = len(request.output_token_ids)
        if not request.finished and (
            length >= request.params.max_tokens or request.num_tokens >= max_model_len
        ):
            request.finish_reason = "length"
    if request.finished:
        finish_text(request)


def finish_text(request: Request) -> None:
    """Release the text that was held back; a stop string may still be found in it."""
    if request.detokenizer is not None:
        request.detokenizer.flush()
        _look_for_stop_string(request)


def fail(request: Request, error: str) -> None:
    """End a request with an error; the others go on."""
    request.finish_reason, request.error = "error", error


def _ends_with_token(request: Request, token_id: int) -> bool:
    """Finish at an end token or a stop token, whose text is not part of the answer."""
    if len(request.output_token_ids) <= request.params.min_tokens:
        return False
    if token_id in request.end_token_ids:
        request.finish_reason = "stop"
    elif token_id in (request.params.stop_token_ids or ()):
        request.finish_reason, request.stop_reason = "stop", token_id
    return request.finished


def _push_text(request: Request, token_id: int) -> None:
    if request.detokenizer is None:
        return
    watch = len(request.output_token_ids) > request.params.min_tokens
    request.detokenizer.push(token_id, watch)
    _look_for_stop_string(request)


def _look_for_stop_string(request: Request) -> None:
    if request.detokenizer is not None and request.detokenizer.stop_string is not None:
        request.finish_reason = "stop"
        request.stop_reason = request.detokenizer.stop_string


def _keep_logprobs(request: Request, token: SampledToken) -> None:
    if request.logprobs is not None and token.logprobs is not None:
        request.logprobs.append(_with_text(request, token.logprobs))
        assert request.cumulative_logprob is not None
        request.cumulative_logprob += token.logprobs[token.token_id].logprob


def _with_text(request: Request, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
    if request.detokenizer is None:
        return logprobs
    text_of = request.detokenizer.token_text
    return {
        token: dataclasses.replace(entry, decoded_token=text_of(token))
        for token, entry in logprobs.items()
    }
