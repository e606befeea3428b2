"""Measure what graphs cost and what they save, on a CUDA device.

    python tests/benchmarks/bench_graphs.py --out docs/benchmarks/h200-graphs.json

Random weights in the shape of Llama-2-7B, bf16, 64 requests at most, four adapter slots of rank
16. Every ratio is of two things measured in turn in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import NO_LORA, Batch, BatchRow
from minilora.bench.provenance import provenance
from minilora.config.capture_sizes import default_sizes
from minilora.engine.make_runner import make_runner
from minilora.lora.layers import LayerOptions
from minilora.runner import ModelRunner
from minilora.testing.shapes import make_shape, make_shape_adapter
from minilora.warmup import MIB, WarmUp

CASES: dict[str, dict[str, bool]] = {
    "no LoRA": {"enable_lora": False},
    "one set": {"specialize_lora": False, "specialize_active_lora": False},
    "two sets": {"specialize_lora": True, "specialize_active_lora": False},
    "by count": {"specialize_lora": True, "specialize_active_lora": True},
}
UNIT = (
    "capture: seconds and MiB; idle, active and host: microseconds of a decode step, medians of "
    "200 replays or 500 steps; first_request: seconds"
)
COMMON: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 64, "max_loras": 4,
    "max_lora_rank": 16, "max_model_len": 4096, "num_kv_blocks": 1200,
}  # fmt: skip


def capture(model: Path) -> dict[str, Any]:
    """Seconds and MiB of each case's graphs, at the usual sizes and at those up to 64.

    Each in a process of its own: the driver keeps the memory of graphs that are gone.
    """
    found: dict[str, Any] = {}
    for most in (64, 512):
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, str(most), str(model)]
            command += ["--compile", COMMON["compile"]]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[f"{case}, sizes to {most}"] = json.loads(out.splitlines()[-1])
            print(case, most, out.splitlines()[-1], flush=True)
    return found


def capture_case(case: str, most: int, model: Path) -> dict[str, Any]:
    """Capture one case in an engine that serves nothing."""
    flags = {"enable_lora": True, **CASES[case]}
    sizes = default_sizes(64) if most == 64 else None
    start = time.perf_counter()
    report = LLM(model, **COMMON, capture_sizes=sizes, **flags).capture_report
    return {
        "graphs": report.graphs,
        "seconds": round(report.seconds, 2),
        "start_seconds": round(time.perf_counter() - start, 2),
        "pool_mib": round(report.pool_memory / MIB, 1),
        "graphs_mib": round(sum(case.memory for case in report.cases) / MIB, 1),
        "cases": [
            [c.mode.name, c.num_active_loras, c.graphs, round(c.seconds, 2), c.memory / MIB]
            for c in report.cases
        ],
    }


def decode_batch(rows: int, adapters: int, context: int = 160) -> Batch:
    """A decode step; each request has KV blocks of its own."""
    blocks = -(-context // 16)
    return Batch(
        tuple(
            BatchRow(
                [5], context - 1, range(1 + row * blocks, 1 + (row + 1) * blocks),
                row % adapters if adapters else NO_LORA, True,
            )
            for row in range(rows)
        )
    )  # fmt: skip


def replay_times(cases: list[tuple[ModelRunner, Batch]], rounds: int) -> list[list[float]]:
    """Microseconds of each case's replay, in turn, on the device.

    The cases of one runner share its buffers, so each step is written before its clock runs.
    """
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + 10):
        for index, (runner, batch) in enumerate(cases):
            key, step = runner.prepare(batch)
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
            start.record()
            runner.replay(key, step)
            end.record()
            end.synchronize()
            if turn >= 10:
                times[index].append(start.elapsed_time(end) * 1e3)
    return times


def idle(off: LLM, on: LLM) -> dict[str, Any]:
    """The decode step of an engine with adapters but none in the batch, over one without.

    Once with the weights of both in the same memory, and once as two engines: equal launches over
    weights in other places differ by some tenths of a percent.
    """
    found = {}
    for name, other in (("same weights", without_lora(on)), ("two engines", off.runner)):
        for rows in (1, 8, 32):
            batch = decode_batch(rows, 0)
            pair = [(other, batch), (on.runner, batch)]
            medians = [round(statistics.median(t), 1) for t in replay_times(pair * 2, 200)]
            ratio = (medians[1] + medians[3]) / (medians[0] + medians[2])
            found[f"{rows} rows, {name}"] = {"us": medians, "ratio": round(ratio, 5)}
            print("idle", found, flush=True)
    return found


def without_lora(llm: LLM) -> ModelRunner:
    """Return a runner of an engine without LoRA on the weights and KV cache of one with it."""
    config = dataclasses.replace(llm.config, enable_lora=False)
    weight = llm.runner.model.embed_tokens.weight
    options = LayerOptions(weight.dtype, weight.device)
    runner = make_runner(config, llm.runner.model, llm.kv_cache, llm.max_model_len, options)
    WarmUp(runner, max_num_seqs=64, max_model_len=llm.max_model_len).run()
    return runner


def active(off: LLM, on: LLM) -> dict[str, Any]:
    """The decode step with adapters in the batch, over one without LoRA; not overlapped yet."""
    found = {}
    for rows in (1, 8, 32):
        for adapters in (1, 2, 4):
            if adapters <= rows:
                cases = [(off.runner, decode_batch(rows, 0))]
                cases.append((on.runner, decode_batch(rows, adapters)))
                a, b = (statistics.median(times) for times in replay_times(cases, 100))
                found[f"{rows} rows, {adapters} adapters"] = [
                    round(a, 1),
                    round(b, 1),
                    round(b / a, 4),
                ]
    print("active", found, flush=True)
    return found


def host(on: LLM) -> dict[str, Any]:
    """Host time of `execute` for a decode step without the replay itself."""
    runner, found = on.runner, {}
    for rows, adapters in ((1, 1), (8, 0), (8, 4), (64, 4)):
        batch = decode_batch(rows, adapters)
        key, step = runner.prepare(batch)
        out, times, launches = runner.replay(key, step), [], []
        plain = runner.replay
        for turn in range(600):
            torch.cuda.synchronize()
            start = time.perf_counter()
            plain(key, step)
            launches.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            runner.replay = lambda *_, out=out: out  # type: ignore[method-assign, misc]
            start = time.perf_counter()
            runner.execute(batch)
            if turn >= 100:
                times.append(time.perf_counter() - start)
            runner.replay = plain  # type: ignore[method-assign]
        found[f"{rows} rows, {adapters} adapters"] = {
            "execute_us": round(statistics.median(times) * 1e6, 1),
            "replay_call_us": round(statistics.median(launches) * 1e6, 1),
        }
    print("host", found, flush=True)
    return found


def maxima(folder: Path) -> dict[str, Any]:
    """Field report P2: one rank-8 adapter under larger maxima; eight layers of the 7B shape."""
    model = make_shape(folder / "p2", "llama-2-7b", num_hidden_layers=8)
    adapter = LoRARequest("a", make_shape_adapter(folder / "p2-adapter", model, r=8))
    options = {**COMMON, "capture_sizes": [1, 8], "graph_mode": "full", "enable_lora": True}
    sizes = [(1, 8), (32, 8), (1, 256), (32, 256)]
    llms = [
        LLM(model, **{**options, "max_loras": loras, "max_lora_rank": rank})
        for loras, rank in sizes
    ]
    for llm in llms:
        llm.generate([[1, 2]], SamplingParams(max_tokens=1), adapter, progress=False)
    found = {}
    for rows in (1, 8):
        cases = [(llm.runner, decode_batch(rows, 1)) for llm in llms]
        medians = [statistics.median(times) for times in replay_times(cases, 200)]
        for (loras, rank), median in zip(sizes, medians, strict=True):
            ratio = round(median / medians[0], 3)
            found[f"{rows} rows, {loras} slots of rank {rank}"] = [round(median, 1), ratio]
    print("maxima", found, flush=True)
    return found


def first_request(on: LLM, adapters: list[LoRARequest]) -> dict[str, float]:
    """Field report P4: the first request of a kind over the second one."""
    found = {}
    for name, length, lora in (
        ("prefill 30, base", 30, None),
        ("prefill 30, adapter", 30, adapters[0]),
        ("prefill 1000, adapter", 1000, adapters[0]),
    ):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            on.generate([[7] * length], SamplingParams(max_tokens=4), lora, progress=False)
            times.append(round(time.perf_counter() - start, 4))
        found[name] = times
    print("first", found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", default="auto", choices=("auto", "inductor", "none"))
    parser.add_argument("--case", nargs=3, metavar=("CASE", "MOST", "MODEL"))
    parser.add_argument("--skip", nargs="*", default=[], help="parts to leave out")
    args = parser.parse_args()
    COMMON["compile"] = args.compile
    if args.case is not None:
        case, most, model = args.case
        print(json.dumps(capture_case(case, int(most), Path(model))))
        return
    out = args.out
    results: dict[str, Any] = {
        **provenance("cuda", " ".join(["python", *sys.argv]), UNIT),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_shape(folder / "7b", "llama-2-7b")
        if "capture" not in args.skip:
            results["capture"] = capture(model)
        start = time.perf_counter()
        sizes = [1, 8, 32, 64]
        off = LLM(model, **COMMON, capture_sizes=sizes)
        results["start_off_s"] = round(time.perf_counter() - start, 1)
        start = time.perf_counter()
        on = LLM(model, **COMMON, capture_sizes=sizes, enable_lora=True)
        results["start_on_s"] = round(time.perf_counter() - start, 1)
        results["idle"] = idle(off, on)
        loras = [
            LoRARequest(f"a{i}", make_shape_adapter(folder / f"a{i}", model, seed=i))
            for i in range(4)
        ]
        on.generate([[1, 2]] * 4, SamplingParams(max_tokens=1), loras, progress=False)
        results["active"] = active(off, on)
        results["host"] = host(on)
        results["first_request"] = first_request(on, loras)
        del off, on
        gc.collect()
        torch.cuda.empty_cache()
        if "maxima" not in args.skip:
            results["maxima"] = maxima(folder)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
