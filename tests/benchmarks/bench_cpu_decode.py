"""A decode step on a CPU, beside transformers' and PEFT's, and what adapters add to it.

    python tests/benchmarks/bench_cpu_decode.py --out docs/benchmarks/cpu-decode.json

A model of SmolLM2-135M's shape with random weights, float32, 8 rows, 4 adapters on all seven
projections, through `ModelRunner`. What is compared is timed in turn, and each pair gives one
ratio: a neighbour on the machine slows both halves of a pair. The median of the pairs is the
figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora.batch import Batch, BatchRow
from minilora.bench.provenance import provenance
from minilora.config.model import ModelConfig
from minilora.graphs.dispatcher import GraphDispatcher
from minilora.lora.layers import LayerOptions, LoraEmbedding, LoraLmHead
from minilora.model.kv_cache import KVCache
from minilora.model.llama import Llama
from minilora.runner import ModelRunner
from minilora.step_buffers import StepBuffers
from minilora.testing import TinyLlama
from minilora.testing.workloads import WORKLOADS, workload

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
BLOCK, CONTEXT = 16, 128
ROWS, ADAPTERS = 8, 4
MEASURED = ("distinct", "skewed", "base_mixed", "identical")
UNIT = (
    "milliseconds of a decode step, 8 rows at context 128: the least of the pairs; ratio: of the "
    "second over the first, the median of the pairs"
)


@torch.no_grad()
def make_runner(rank: int = 8, slots: int = 4, compiled: bool = False, **shape: Any) -> ModelRunner:
    """A random model with every slot of every projection filled."""
    config = ModelConfig.from_dict(TinyLlama(**{**SMOLLM2, **shape}).config())
    options = LayerOptions(torch.float32, torch.device("cpu"), slots, rank)
    model = Llama(config, 2 * CONTEXT, options, compiled)
    gen = torch.Generator().manual_seed(0)
    for _, weight in model.checkpoint_tensors():
        weight.normal_(0, weight.shape[-1] ** -0.5, generator=gen)
    for layer in model.lora_layers():
        if isinstance(layer, (LoraEmbedding, LoraLmHead)):
            continue  # the seven projections only; rank 0 leaves these out
        for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked):
            stack.normal_(0, 0.01, generator=gen)
        layer.lora_ranks.fill_(rank)
    KVCache(config, 8 * CONTEXT // BLOCK, BLOCK, options.dtype, options.device).bind(model)
    buffers = StepBuffers(
        max_num_tokens=64,
        max_num_seqs=8,
        max_blocks=CONTEXT // BLOCK,
        block_size=BLOCK,
        max_loras=slots,
        device="cpu",
    )
    dispatcher = GraphDispatcher(
        graph_mode="none", max_num_seqs=8, max_num_batched_tokens=64, max_loras=slots
    )
    return ModelRunner(model, buffers, dispatcher)


def decode_batch(slots: Sequence[int], context: int = CONTEXT) -> Batch:
    """One new token of each request, at the end of a context."""
    blocks = CONTEXT // BLOCK

    def row_of(row: int, slot: int) -> BatchRow:
        first = 1 + row * blocks  # block 0 belongs to nobody
        return BatchRow([row + 1], context - 1, range(first, first + blocks), slot, samples=True)

    return Batch(tuple(row_of(row, slot) for row, slot in enumerate(slots)))


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def in_pairs(one: Callable[[], object], other: Callable[[], object], pairs: int) -> dict[str, Any]:
    """Time two calls in turn; the ratio is of the second over the first."""
    for _ in range(3):
        one()
        other()
    times = [(milliseconds(one), milliseconds(other)) for _ in range(pairs)]
    least = min(a for a, _ in times), min(b for _, b in times)
    return {
        "first_ms": round(least[0], 2),
        "second_ms": round(least[1], 2),
        "ratio": round(statistics.median(b / a for a, b in times), 3),
        "ratio_of_least": round(least[1] / least[0], 3),
        "pairs": pairs,
    }


def compare(runner: ModelRunner, slots: Sequence[int], pairs: int) -> dict[str, Any]:
    """Time steps with base rows and with these slots in turn."""
    base, lora = decode_batch(workload("none", ROWS, ADAPTERS)), decode_batch(slots)
    return in_pairs(lambda: runner.execute(base), lambda: runner.execute(lora), pairs)


def transformers_step(adapters: int, rank: int) -> Callable[[], object]:
    """The same decode step by transformers, with PEFT if there are adapters, mixed if many."""
    import transformers

    config = transformers.LlamaConfig(**SMOLLM2, max_position_embeddings=2 * CONTEXT)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    names: dict[str, Any] = {}
    if adapters:
        import peft

        kinds = [peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)]
        model = peft.get_peft_model(model, kinds[0], "a0").eval()
        for i in range(1, adapters):
            model.add_adapter(f"a{i}", kinds[0])
        if adapters > 1:  # PEFT's way to mix; one adapter alone needs none
            names = {"adapter_names": [f"a{row % adapters}" for row in range(ROWS)]}
    ids = torch.ones(ROWS, CONTEXT - 1, dtype=torch.long)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **names)

    @torch.no_grad()
    def step() -> object:
        out = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, **names)
        cache.crop(-1)  # the new token leaves again
        return out

    return step


def against_transformers(runner: ModelRunner, rank: int, pairs: int) -> dict[str, Any]:
    """Time our step and transformers' without adapters, and with one and four of PEFT's."""
    found = {}
    for adapters, name in ((0, "none"), (1, "identical"), (ADAPTERS, "distinct")):
        batch = decode_batch(workload(name, ROWS, ADAPTERS))
        theirs = transformers_step(adapters, rank)
        run = partial(runner.execute, batch)
        found[f"{adapters} adapters"] = in_pairs(theirs, run, pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=MEASURED)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="our step with torch.compile")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runner = make_runner(args.rank, compiled=args.compile)
    command = " ".join(["python", *sys.argv])
    result = {
        **provenance("cpu", command, UNIT, packages=("transformers", "peft")),
        "rank": args.rank,
        "over transformers": against_transformers(runner, args.rank, args.pairs),
        "over base rows": {
            name: compare(runner, workload(name, ROWS, ADAPTERS), args.pairs)
            for name in args.workload
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
