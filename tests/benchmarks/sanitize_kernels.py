"""A short run of the LoRA kernels for compute-sanitizer, checked against the CPU.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python tests/benchmarks/sanitize_kernels.py

and the same with ``--tool racecheck`` and ``--tool initcheck``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora.ops import KernelMeta
from minilora.ops.triton.expand import expand
from minilora.ops.triton.launch import Routing
from minilora.ops.triton.shrink import shrink

OUTS, RANK, RANKS, SLOTS = (130, 33, 64), 20, [20, 0, 3, 16], 4


def once(rows: int, width: int, dtype: torch.dtype) -> float:
    gen = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    mapping = [*random.Random(rows).choices([-1, 0, 1, 2, 3], k=rows - 1), 0]
    x, out = normal(rows, width), normal(rows, sum(OUTS))
    a = [normal(SLOTS, RANK, width) for _ in OUTS]
    b = [normal(SLOTS, n, RANK) for n in OUTS]
    meta = KernelMeta(rows, SLOTS, "cuda")
    active = len({slot for slot in mapping if slot >= 0})
    meta.prepare(mapping, rows, active)
    routing = Routing(
        meta.token_lora_mapping,
        meta.token_indices_sorted_by_lora_ids,
        meta.active_lora_ids,
        meta.num_tokens_per_lora,
    )
    ranks = torch.tensor(RANKS, dtype=torch.int32).cuda()
    got = out.cuda()
    h = shrink(x.cuda(), [t.cuda() for t in a], routing, ranks, active)
    expand(h, [t.cuda() for t in b], got, routing, ranks, active)
    want = out.double()
    for row, slot in enumerate(mapping):
        if slot >= 0:
            r, xr = RANKS[slot], x[row].double()
            halves = zip(a, b, strict=True)
            want[row] += torch.cat(
                [q[slot, :, :r].double() @ p[slot, :r].double() @ xr for p, q in halves]
            )
    return ((got.cpu().double() - want).norm() / (want - out.double()).norm()).item()


for case in ((1, 1040), (7, 1040), (20, 1033), (70, 1040), (150, 64)):
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        error = once(*case, kind)
        print(case, kind, f"{error:.1e}", flush=True)
        assert error < 5e-3
