"""Append a sampled token to its request, and decide whether the answer ends with it."""

from __future__ import annotations

import dataclasses

from minilora.engine.request import Request
from minilora.engine.sampler import Logprob, SampledToken


def commit_token(request: Request, token: SampledToken, max_model_len: int) -> None:
    """Append `token`, update text and log probabilities, and end the answer if it does.

    A row of logits without a token to choose fails the request; it is never token 0.
    """
    if not token.finite:
        request.fail(_no_token(request))
        return
    request.output_token_ids.append(token.token_id)
    _keep_logprobs(request, token)
    reason = _stop_by_token(request, token.token_id)
    if reason is None:
        reason = _push_text(request, token.token_id) or _length_limit(request, max_model_len)
    if reason is not None:
        finish(request, reason)


def finish(request: Request, reason: str) -> None:
    """End an answer: release the text that was held back, where a stop string may still be."""
    if request.detokenizer is not None:
        request.detokenizer.flush()
        reason = _stop_by_text(request) or reason
    request.finish_reason = reason  # last: whoever sees it, in any thread, sees all the text


def _no_token(request: Request) -> str:
    by = f"adapter {request.adapter.name!r}" if request.adapter else "the base model"
    banned = " or min_tokens bans every token" if request.banned_token_ids() else ""
    return f"{by} gave logits that are not finite (NaN or infinite){banned}; no token is chosen"


def _stop_by_token(request: Request, token_id: int) -> str | None:
    """Return "stop" at an end token or a stop token, whose text is not part of the answer."""
    if len(request.output_token_ids) <= request.params.min_tokens:
        return None
    if token_id in request.end_token_ids:
        return "stop"
    if token_id in (request.params.stop_token_ids or ()):
        request.stop_reason = token_id
        return "stop"
    return None


def _push_text(request: Request, token_id: int) -> str | None:
    if request.detokenizer is None:
        return None
    watch = len(request.output_token_ids) > request.params.min_tokens
    request.detokenizer.push(token_id, watch)
    return _stop_by_text(request)


def _stop_by_text(request: Request) -> str | None:
    if request.detokenizer is None or request.detokenizer.stop_string is None:
        return None
    request.stop_reason = request.detokenizer.stop_string
    return "stop"


def _length_limit(request: Request, max_model_len: int) -> str | None:
    long = len(request.output_token_ids) >= request.params.max_tokens
    return "length" if long or request.num_tokens >= max_model_len else None


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
