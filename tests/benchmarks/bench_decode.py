"""Measure a decode step against its floor, on a CUDA device.

    python tests/benchmarks/bench_decode.py --out docs/benchmarks/h200-decode.json

Random weights in bf16. A step's floor is the time to read the weights of its matrix products and
the keys and values of its contexts once, at the rate of a read-only reduction. Every ratio is of
two things replayed in turn in one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_graphs import decode_batch, replay_times

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora import LLM, SamplingParams
from minilora.batch import Batch
from minilora.bench.provenance import provenance
from minilora.bench.setup import Setup, make_setup
from minilora.runner import ModelRunner

# As in `minilora.graphs.cuda`: the profiler is started more than once beside graphs.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")

BYTES_PER_S = 4.27e12  # a read-only reduction on an H200
SHORT = {"max_model_len": 4096, "num_kv_blocks": 1200}
LONG = {"max_model_len": 32768, "num_kv_blocks": 4200}
PARTS: dict[str, tuple[str, str, list[tuple[int, int, tuple[int, ...]]], int, dict[str, int]]] = {
    # part: name, shape, [(rows, context, numbers of active adapters)], slots, options
    "7b": (
        "llama-2-7b", "llama-2-7b",
        [(1, 160, (0, 1)), (8, 160, (0, 1, 2, 4)), (32, 160, (0, 1, 4))], 4, SHORT,
    ),
    "8k": (
        "llama-3.1-8b, 8k", "llama-3.1-8b", [(8, 8000, (0, 1, 4)), (1, 8000, (0, 1))], 4, LONG,
    ),
    "16": (
        "llama-3.1-8b, 16 adapters", "llama-3.1-8b", [(1, 160, (1,)), (64, 160, (16,))], 16, SHORT,
    ),
}  # fmt: skip
UNIT = "milliseconds of a decode step; over_floor, over_off: ratios; profile: us and launches"


def floor_ms(llm: LLM, rows: int, context: int) -> float:
    """Milliseconds to read what a decode step must read, once."""
    model, config = llm.runner.model, llm.model_config
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    kv = rows * context * 2 * layers * heads * config.head_dim
    return (weights + kv) * 2 / BYTES_PER_S * 1e3


def medians(cases: Sequence[tuple[ModelRunner, Batch]], rounds: int = 100) -> list[float]:
    """Milliseconds of each case's replay, in turn."""
    return [statistics.median(times) / 1e3 for times in replay_times(list(cases), rounds)]


def load_adapters(llm: LLM, setup: Setup) -> None:
    """Fill the slots, in order."""
    count = len(setup.loras)
    llm.generate([[1, 2]] * count, SamplingParams(max_tokens=1), list(setup.loras), progress=False)


def steps(
    off: LLM, on: LLM, cases: Sequence[tuple[int, int, Sequence[int]]]
) -> dict[str, dict[str, Any]]:
    """Measure the cases: rows, context, numbers of active adapters."""
    found = {}
    for rows, context, adapters in cases:
        runs = [(off.runner, decode_batch(rows, 0, context))]
        runs += [(on.runner, decode_batch(rows, n, context)) for n in adapters]
        base, *others = medians(runs)
        floor = floor_ms(off, rows, context)
        one: dict[str, Any] = {
            "floor_ms": round(floor, 4),
            "off_ms": round(base, 4),
            "over_floor": round(base / floor, 4),
        }
        for n, ms in zip(adapters, others, strict=True):
            one[f"{n} adapters"] = {"ms": round(ms, 4), "over_off": round(ms / base, 4)}
        found[f"{rows} rows, context {context}"] = one
        print(rows, context, one, flush=True)
    return found


def profile(runner: ModelRunner, rows: int, adapters: int) -> list[list[Any]]:
    """Return (kernel, launches a step, microseconds a step) of a decode step's replay."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    key, step = runner.prepare(decode_batch(rows, adapters))
    runner.replay(key, step)
    torch.cuda.synchronize()
    turns = 10
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(turns):
            runner.replay(key, step)
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for event in found.events() or ():
        if str(event.device_type) == "DeviceType.CUDA":
            count[event.name[:90]] += 1
            us[event.name[:90]] += event.device_time
    table = [[name, count[name] / turns, round(us[name] / turns, 1)] for name in count]
    return sorted(table, key=lambda line: -line[2])


def host_gap(llm: LLM, rows: int = 8, length: int = 128) -> dict[str, float]:
    """Milliseconds of a decode step in the engine, and what of them no replay fills."""
    (device,) = medians([(llm.runner, decode_batch(rows, 0))])
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for prompt in range(rows):
        llm.add_request([5 + prompt] * 96, params)
    times: list[float] = []
    while llm.has_unfinished_requests():
        start = time.perf_counter()
        llm.step()
        times.append((time.perf_counter() - start) * 1e3)
    step = statistics.median(times[2:-2])
    return {"step_ms": step, "replay_ms": device, "gap_us": (step - device) * 1e3}


def measure_shape(
    shape: str, cases: Sequence[tuple[int, int, Sequence[int]]], slots: int, **options: Any
) -> dict[str, Any]:
    """Measure one shape with `slots` adapters loaded."""
    result: dict[str, Any] = {}
    rows = sorted({case[0] for case in cases})
    with tempfile.TemporaryDirectory() as name:
        setup = make_setup(Path(name), shape=shape, model=None, adapters=slots)
        options = {"capture_sizes": rows, "max_num_seqs": rows[-1], **options}
        start = time.perf_counter()
        off = setup.llm(enable_lora=False, **options)
        result["start_off_s"] = round(time.perf_counter() - start, 1)
        start = time.perf_counter()
        on = setup.llm(**options)
        result["start_on_s"] = round(time.perf_counter() - start, 1)
        load_adapters(on, setup)
        result["steps"] = steps(off, on, cases)
        if 8 in rows:
            result["profile_off"] = profile(off.runner, 8, 0)
            result["profile_on"] = profile(on.runner, 8, min(4, slots))
            result["host"] = host_gap(off)
            print(result["host"], flush=True)
    del off, on
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", default="auto", choices=("auto", "inductor", "none"))
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    result = provenance("cuda", " ".join(["python", *sys.argv]), UNIT)
    for part in args.only:
        name, shape, cases, slots, options = PARTS[part]
        result[name] = measure_shape(shape, cases, slots, compile=args.compile, **options)
        if args.out:  # after each part: a run that is cut short has said something
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
