"""`throughput` and `serve`: many requests (the shape of vLLM #32005).

`serve` keeps a fixed number of requests in flight; when one ends the next begins. Adapters are
drawn with Zipf weights, so that a few are popular.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minilora.bench.setup import fixed_length, in_turn, prompts, refuse_long, refuse_short
from minilora.config.lora import LoRARequest
from minilora.engine.llm import LLM
from minilora.testing.workloads import workload


def throughput(
    llm: LLM, loras: Sequence[LoRARequest], num_prompts: int, input_len: int, output_len: int
) -> dict[str, float]:
    """Serve all prompts at once and return requests and generated tokens a second."""
    refuse_long(llm, input_len, output_len)
    params, chosen = fixed_length(output_len), in_turn(loras, num_prompts)
    given = prompts(llm, num_prompts, input_len)
    llm.generate(given[:1], fixed_length(1), chosen[0] if loras else None, progress=False)
    start = time.perf_counter()
    outputs = llm.generate(given, params, chosen if loras else None, progress=False)
    seconds = time.perf_counter() - start
    refuse_short(outputs, output_len)
    return {
        "seconds": seconds,
        "requests_per_s": num_prompts / seconds,
        "tokens_per_s": num_prompts * output_len / seconds,
    }


@dataclass
class _Flight:
    """One request under way: when it came, and when its first token did."""

    start: float
    first: float | None = None


@dataclass
class _Times:
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)


def serve(
    llm: LLM,
    loras: Sequence[LoRARequest],
    concurrency: int,
    num_requests: int,
    input_len: int,
    output_len: int,
) -> dict[str, float]:
    """Keep `concurrency` requests in flight until `num_requests` are done.

    Returns:
        Median and 99th percentile of the time to the first token and of the time per token after
        it (seconds), and generated tokens a second.
    """
    refuse_long(llm, input_len, output_len)
    requests = _requests(llm, loras, num_requests, input_len)
    flying: dict[str, _Flight] = {}
    times, params = _Times(), fixed_length(output_len)
    start = time.perf_counter()
    while True:
        while len(flying) < concurrency and (request := next(requests, None)) is not None:
            tokens, lora = request
            flying[llm.add_request(tokens, params, lora)] = _Flight(time.perf_counter())
        if not flying:
            break
        finished = llm.step()
        now = time.perf_counter()
        for running in llm.scheduler.running:
            if running.output_token_ids and flying[running.request_id].first is None:
                flying[running.request_id].first = now
        refuse_short(finished, output_len)
        for output in finished:
            _land(flying.pop(output.request_id), now, output_len, times)
    return _figures(times, num_requests * output_len / (time.perf_counter() - start))


def _requests(
    llm: LLM, loras: Sequence[LoRARequest], count: int, length: int
) -> Iterator[tuple[list[int], LoRARequest | None]]:
    chosen = workload("zipf", count, len(loras)) if loras else [-1] * count
    for tokens, adapter in zip(prompts(llm, count, length), chosen, strict=True):
        yield tokens, loras[adapter] if adapter >= 0 else None


def _land(flight: _Flight, now: float, output_len: int, times: _Times) -> None:
    first = now if flight.first is None else flight.first
    times.first_token.append(first - flight.start)
    if output_len > 1:
        times.per_token.append((now - first) / (output_len - 1))


def _figures(times: _Times, tokens_per_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_s": tokens_per_s}
    for name, values in (("ttft", times.first_token), ("tpot", times.per_token)):
        found[f"{name}_median_s"] = statistics.median(values or [0.0])
        found[f"{name}_p99_s"] = float(np.percentile(values or [0.0], 99))
    return found
