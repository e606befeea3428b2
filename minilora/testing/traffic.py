"""Named traffic for the harness: prompts, adapters and what happens between the calls.

A `Traffic` is a function of an engine and its adapters. It calls `LLM.generate` and friends and
looks at nothing: whoever runs it watches the steps (see `minilora.testing.checker`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams
from minilora.engine.llm import LLM
from minilora.testing.workloads import WORKLOADS, workload

Adapters = Mapping[str, str]
Traffic = Callable[[LLM, Adapters], None]
NO_ADAPTER = ""


def row_counts(llm: LLM) -> list[int]:
    """Return batch sizes at, below and above every size that the engine captures."""
    keys = llm.runner.dispatcher.keys
    sizes = {key.descriptor.num_tokens for key in keys} or {1, 2, 4}
    most = llm.config.max_num_seqs
    near = {size + offset for size in sizes | {most} for offset in (-1, 0, 1)}
    return sorted(rows for rows in near if 1 <= rows <= most)


def serve(
    llm: LLM, adapters: Adapters, names: Sequence[str], max_tokens: int = 3, seed: int = 0
) -> None:
    """Serve one request for each name (`NO_ADAPTER`: the base model), prompts drawn at random."""
    rng = random.Random(f"{names} {seed}")
    vocab = llm.model_config.vocab_size
    longest = max(1, min(20, llm.max_model_len - max_tokens))
    prompts = [
        [rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(len(names))
    ]
    loras = [LoRARequest(name, adapters[name]) if name else None for name in names]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.generate(prompts, params, loras, progress=False)


def sized(name: str) -> Traffic:
    """Return traffic of one of `WORKLOADS` at every size of `row_counts`."""

    def run(llm: LLM, adapters: Adapters) -> None:
        listed = list(adapters)
        for rows in row_counts(llm):
            slots = workload(name, rows, max(1, len(listed)), seed=rows)
            chosen = [listed[slot] if slot >= 0 and listed else NO_ADAPTER for slot in slots]
            serve(llm, adapters, chosen)

    return run


def counts(llm: LLM, adapters: Adapters) -> None:
    """Serve every number of adapters, alone and among rows of the base model."""
    listed = list(adapters)
    for count in range(min(len(listed), llm.config.max_num_seqs) + 1):
        chosen = listed[:count] or [NO_ADAPTER]
        serve(llm, adapters, chosen)
        mixed = [
            name for pair in zip(chosen, [NO_ADAPTER] * len(chosen), strict=True) for name in pair
        ]
        serve(llm, adapters, mixed)


def shuffle(llm: LLM, adapters: Adapters) -> None:
    """Let adapters come and go between replays: swaps, reloads, unloads and evictions."""
    listed = list(adapters)
    if not listed:
        serve(llm, adapters, [NO_ADAPTER] * 2)
        return
    a, b = listed[0], listed[-1]
    rng = random.Random(0)
    groups = [[a], [b], [a, b], [a, NO_ADAPTER], [NO_ADAPTER], [b, NO_ADAPTER, a], [b, b, a]]
    for turn in range(3):
        rng.shuffle(groups)
        for group in groups:
            serve(llm, adapters, group, seed=turn)
        llm.load_adapter(a, adapters[a])  # a new version, in a slot of its own
        serve(llm, adapters, [NO_ADAPTER, *listed])  # more than slots: evictions
        llm.unload_adapter(b)
        serve(llm, adapters, [a, NO_ADAPTER, b], seed=turn)


def long_answers(llm: LLM, adapters: Adapters) -> None:
    """Cross block borders, with rows ending at different times (SGLang 26930)."""
    names = [NO_ADAPTER, *list(adapters)[: llm.config.max_num_seqs - 1]]
    most = min(3 * llm.config.block_size + 2, llm.max_model_len // 2)
    serve(llm, adapters, names, max_tokens=max(1, most))


def staggered(llm: LLM, adapters: Adapters) -> None:
    """Let requests come while others run, in chunks where the budget is small; abort some.

    Steps then hold decode rows, chunks that do not sample, and several answers of one prompt.
    """
    rng, listed = random.Random(0), [NO_ADAPTER, *adapters]
    vocab, longest = llm.model_config.vocab_size, max(1, llm.max_model_len // 2)
    waiting: list[str] = []
    for turn in range(24):
        name = listed[turn % len(listed)]
        lora = LoRARequest(name, adapters[name]) if name else None
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, min(30, longest)))]
        n = 2 if turn % 5 == 4 and llm.config.max_num_seqs > 1 else 1
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=n)
        waiting.append(llm.add_request(tokens, params, lora))
        for _ in range(rng.randrange(3)):
            llm.step()
        if turn % 7 == 6:
            llm.abort(waiting.pop(rng.randrange(len(waiting))))
    while llm.has_unfinished_requests():
        llm.step()


TRAFFIC: Mapping[str, Traffic] = {
    **{name: sized(name) for name in WORKLOADS},
    "counts": counts,
    "shuffle": shuffle,
    "staggered": staggered,
    "long": long_answers,
}
