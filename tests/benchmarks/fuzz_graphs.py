"""Random traffic on the signature checkpoint, from graphs.

python tests/benchmarks/fuzz_graphs.py STEPS [SEED [DTYPE [AHEAD]]]

AHEAD 1: with async_scheduling. The exit code is 0 only if all steps ran and no token was wrong.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora import LLM
from minilora.testing import fuzz, make_signature_adapter, make_signature_llama

SIGNS = ["down-1", "down-7", "down-9", "v-2", "v-5", "v-11"]


def main() -> int:
    steps, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    dtype = sys.argv[3] if len(sys.argv) > 3 else "float32"
    ahead = len(sys.argv) > 4 and sys.argv[4] == "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_signature_llama(folder / "m")
        signs = {}
        for sign in SIGNS:
            kind, token = sign.split("-")
            made = make_signature_adapter(folder / sign, model, kind=kind, token=int(token), r=2)
            signs[sign] = (str(made), int(token))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        llm = LLM(
            model, graph="cuda" if device == "cuda" else "recorded", device=device,
            dtype=dtype, enable_lora=True, max_loras=3, max_num_seqs=8, max_num_batched_tokens=24,
            max_model_len=64, num_kv_blocks=24, block_size=8, async_scheduling=ahead,
        )  # fmt: skip
        start, done, wrong = time.perf_counter(), 0, False
        while (
            done < steps and not wrong
        ):  # in parts, so that a run that is cut short says something
            report = fuzz(llm, signs, min(10_000, steps - done), seed + done)
            done, wrong = done + report.steps, bool(report.wrong)
            modes = {mode.name: count for mode, count in llm.runner.num_steps.items()}
            print(
                f"{done} steps on {device} in {time.perf_counter() - start:.0f} s, {modes}; "
                f"wrong: {report.wrong or 'none'}",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
