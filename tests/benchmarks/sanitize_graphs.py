"""A short run of a tiny model from CUDA graphs for compute-sanitizer, compared with eager steps.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/benchmarks/sanitize_graphs.py

and the same with ``--tool racecheck``. Graphs need torch's caching allocator, so memcheck sees its
segments and not each tensor; `sanitize_kernels.py` runs the LoRA kernels without it. Every Triton
kernel runs: shrink, expand, decode attention with one share and with several, store_kv; FULL,
PIECEWISE and eager.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import GraphMode
from minilora.testing import make_tiny_adapter, make_tiny_llama

OPTIONS: dict[str, Any] = {
    "enable_lora": True, "max_loras": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48,
    "max_model_len": 256, "num_kv_blocks": 40, "capture_sizes": [1, 3, 16, 48], "device": "cuda",
    "compile": "none",  # what Inductor makes is not ours
}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "m", num_hidden_layers=1)
        loras = [
            LoRARequest(f"a{r}", make_tiny_adapter(folder / f"a{r}", model, r=r)) for r in (3, 16)
        ]
        prompts = [[5] * 130, [6, 7], [8] * 9]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for dtype in ("float32", "bfloat16"):
            answers = {}
            for graph in ("cuda", "none"):
                llm = LLM(model, graph=graph, dtype=dtype, **OPTIONS)
                outputs = llm.generate(prompts, params, [*loras, None], progress=False)
                answers[graph] = [output.token_ids for output in outputs]
                steps = {mode.name: llm.runner.num_steps[mode] for mode in GraphMode}
                print(dtype, graph, steps, flush=True)
                if graph == "cuda":
                    assert min(steps["FULL"], steps["PIECEWISE"]) > 0, steps
            if dtype == "float32":
                assert answers["cuda"] == answers["none"], answers
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
