"""`latency` and `compare`: one batch from prompt to last token (the shape of vLLM #25914)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minilora.bench.setup import Setup, fixed_length, in_turn, prompts, refuse_long, refuse_short
from minilora.config.lora import LoRARequest
from minilora.engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
Run = Callable[[], None]


def batch(
    llm: LLM,
    loras: Sequence[LoRARequest | None],
    batch_size: int = 8,
    input_len: int = 32,
    output_len: int = 128,
) -> Run:
    """Return a function that serves one batch; `loras` are dealt to its rows in turn."""
    refuse_long(llm, input_len, output_len)
    given = prompts(llm, batch_size, input_len)
    chosen = in_turn(loras, batch_size)
    params = fixed_length(output_len)

    def run() -> None:
        outputs = llm.generate(given, params, chosen if loras else None, progress=False)
        refuse_short(outputs, output_len)

    return run


def measure(runs: Mapping[str, Run], iterations: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the seconds of every run, all of them in turn, so that a drift meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + iterations):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the average and the percentiles that vLLM's latency benchmark prints."""
    found = np.percentile(seconds, PERCENTILES).tolist()
    return {
        "average": statistics.fmean(seconds),
        "percentiles": {str(p): value for p, value in zip(PERCENTILES, found, strict=True)},
        "samples": len(seconds),
    }


def compare(
    setup: Setup, counts: Sequence[int], iterations: int, options: Mapping[str, Any], **shape: int
) -> dict[str, dict[str, Any]]:
    """Measure LoRA off, LoRA idle, and each number of adapters, in turn in one run.

    Args:
        setup: with as many adapters as the largest count.
        counts: numbers of adapters in the batch.
        iterations: batches of each case.
        options: of both engines.
        **shape: of the batch, see `batch`.

    Returns:
        For each case its `summary`, and the ratio of its median over LoRA off.
    """
    off, on = setup.llm(enable_lora=False, **options), setup.llm(**options)
    runs = {"off": batch(off, (), **shape), "idle": batch(on, (), **shape)}
    runs |= {f"{n} adapters": batch(on, setup.loras[:n], **shape) for n in counts}
    found = {name: summary(times) for name, times in measure(runs, iterations).items()}
    base = found["off"]["percentiles"]["50"]
    return {
        name: {**one, "over_off": one["percentiles"]["50"] / base} for name, one in found.items()
    }
