"""Beside what users have today: transformers, and PEFT with one adapter and with four mixed.

    python tests/benchmarks/bench_peers.py --shape llama-2-7b --out FILE.json

Random weights of one shape, greedy, one batch from prompt to last token. All cases run in turn in
one process, so that a drift of the machine meets all of them alike. transformers runs with its
dynamic cache, and on CUDA also with a static cache and `torch.compile`; PEFT's adapters run with
the dynamic cache, one adapter for the whole batch and four mixed through ``adapter_names``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora.bench import latency
from minilora.bench.provenance import provenance
from minilora.bench.setup import Setup, make_setup
from minilora.testing.shapes import SHAPES

ADAPTERS = 4
UNIT = "seconds of one batch, from prompt to last token; average and percentiles"
Runs = dict[str, Callable[[], None]]


def ours(setup: Setup, device: str, batch: dict[str, int]) -> Runs:
    """minilora without LoRA, with one adapter and with four."""
    rows = batch["batch_size"]
    sizes = {"max_num_seqs": rows, "max_model_len": batch["input_len"] + batch["output_len"]}
    off, on = (setup.llm(enable_lora=lora, device=device, **sizes) for lora in (False, True))
    some = {"one adapter": setup.loras[:1], f"{ADAPTERS} adapters": setup.loras}
    runs = {"minilora, no LoRA": latency.batch(off, (), **batch)}
    return runs | {f"minilora, {n}": latency.batch(on, used, **batch) for n, used in some.items()}


def theirs(folder: Path, rank: int, device: str, batch: dict[str, int]) -> Runs:
    """transformers without LoRA, then PEFT with one adapter and with four mixed."""
    import peft
    import transformers

    rows, new = batch["batch_size"], batch["output_len"]
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        plain: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        adapted: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    kind = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(adapted, kind, "a0").eval()
    for index in range(1, ADAPTERS):
        adapted.add_adapter(f"a{index}", kind)
    adapted.to(device=device, dtype=dtype)
    ids = torch.randint(3, config.vocab_size, (rows, batch["input_len"]), device=device)
    common = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    common |= {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}

    def run(model: Any, **more: Any) -> Callable[[], None]:
        @torch.no_grad()
        def generate() -> None:
            out = model.generate(**common, **more)
            assert out.shape[1] == ids.shape[1] + new
            if device == "cuda":
                torch.cuda.synchronize()

        return generate

    mixed = [f"a{row % ADAPTERS}" for row in range(rows)]
    runs = {
        "transformers, dynamic cache": run(plain),
        "PEFT, one adapter": run(adapted),
        f"PEFT, {ADAPTERS} adapters mixed": run(adapted, adapter_names=mixed),
    }
    if device == "cuda":  # transformers compiles generation with a static cache on CUDA only
        runs["transformers, static cache"] = run(plain, cache_implementation="static")
    return runs


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=5)
    for name, default in (("batch-size", 8), ("input-len", 32), ("output-len", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = {name: getattr(args, name) for name in ("batch_size", "input_len", "output_len")}
    with tempfile.TemporaryDirectory() as scratch:
        setup = make_setup(
            Path(scratch), shape=args.shape, model=None, adapters=ADAPTERS, rank=args.rank
        )
        runs = ours(setup, device, batch) | theirs(setup.model, args.rank, device, batch)
        found = latency.measure(runs, args.iterations, warm_up=1)
    command = " ".join(["python", *sys.argv])
    result: dict[str, Any] = {
        **provenance(device, command, UNIT, packages=("transformers", "peft")),
        "options": {name: value for name, value in vars(args).items() if name != "out"},
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "results": {name: latency.summary(seconds) for name, seconds in found.items()},
    }
    for name, one in result["results"].items():
        print(f"{name:30} {one['percentiles']['50']:8.3f} s (median of {one['samples']})")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
