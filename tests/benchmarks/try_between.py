"""An experiment: what lies between the products of a decode step, in fewer or earlier launches.

    python tests/benchmarks/try_between.py --out docs/benchmarks/h200-between.json

Engines of one shape with the same weights, on a CUDA device; their decode steps are replayed in
turn. Ways: as it is; the compiled functions launched as programmatic dependents (Inductor's
`enable_pdl`); rotary embedding and KV store in one kernel; both.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from bench_graphs import decode_batch, replay_times
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minilora import LLM
from minilora.batch import StepContext
from minilora.bench.provenance import provenance
from minilora.bench.setup import make_setup
from minilora.graphs.piecewise import outside_graph
from minilora.model.fused import rotate
from minilora.model.layers import Attention
from minilora.ops.attention import store_kv
from minilora.ops.triton.launch import INTERPRETED, launches_early, next_power_of_2

ROWS, CONTEXT = (1, 8, 32), 160
WAYS = {"as it is": (), "pdl": ("pdl",), "fused": ("fused",), "fused, pdl": ("fused", "pdl")}
UNIT = "microseconds of a decode step, context 160, no LoRA, median of 100 replays in turn"


@triton.jit
def _rotate_and_store_kernel(
    qkv, positions, cos, sin, q_out, k_cache, v_cache, slot_mapping,
    qkv_row, cache_block, cache_token, cache_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads); q goes to `q_out`, k and v to their slots."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    # The step's tables were written before the graph began.
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    there = (head < HEADS + 2 * KV_HEADS) & (d < HALF)
    x = qkv + row * qkv_row + head * 2 * HALF + d
    first = tl.load(x, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    turned = head < HEADS + KV_HEADS
    left = tl.where(turned, first * c - second * s, first)
    right = tl.where(turned, second * c + first * s, second)
    to_q = q_out + (row * HEADS + head) * 2 * HALF + d
    cached = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + d
    to_k = k_cache + cached + (head - HEADS) * cache_head
    to_v = v_cache + cached + (head - HEADS - KV_HEADS) * cache_head
    is_q = there & (head < HEADS)
    is_k = there & (head >= HEADS) & turned
    is_v = there & (head >= HEADS + KV_HEADS)
    dtype = q_out.dtype.element_ty
    tl.store(to_q, left.to(dtype), mask=is_q)
    tl.store(to_q + HALF, right.to(dtype), mask=is_q)
    tl.store(to_k, left.to(dtype), mask=is_k)
    tl.store(to_k + HALF, right.to(dtype), mask=is_k)
    tl.store(to_v, left.to(dtype), mask=is_v)
    tl.store(to_v + HALF, right.to(dtype), mask=is_v)


def rotate_and_store(
    qkv: torch.Tensor,
    step: StepContext,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Return the rotated queries ``[T, Hq, D]`` of ``[T, Hq + 2 Hkv, D]``; cache the rest."""
    rows, all_heads, width = qkv.shape
    kv_heads, half = k_cache.shape[2], width // 2
    heads = all_heads - 2 * kv_heads
    assert k_cache.stride() == v_cache.stride()
    assert qkv.stride()[1:] == (width, 1)
    q = torch.empty(rows, heads, width, dtype=qkv.dtype, device=qkv.device)
    block_d = next_power_of_2(half)
    block_h = min(next_power_of_2(all_heads), max(1, 1024 // block_d))
    early = launches_early(qkv.device)
    _rotate_and_store_kernel[rows, -(-all_heads // block_h)](
        qkv, step.positions, cos, sin, q, k_cache, v_cache, step.slot_mapping,
        qkv.stride(0), *k_cache.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK_SIZE=k_cache.shape[1],
        BLOCK_H=block_h, BLOCK_D=block_d, EARLY=early,
        **({} if INTERPRETED else {"num_warps": 4, "launch_pdl": early}),
    )  # fmt: skip
    return q


def fused_forward(self: Attention, x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """`Attention.forward` with one launch where it has two."""
    qkv = self.qkv_proj(x, step).unflatten(-1, (-1, self.head_dim))
    rope = self.rope
    q = rotate_and_store(qkv, step, rope.cos, rope.sin, self.k_cache, self.v_cache)
    attended: torch.Tensor = outside_graph(self._attend, q, step)
    out: torch.Tensor = self.o_proj(attended.flatten(1), step)
    return out


@contextmanager
def changed(parts: tuple[str, ...]) -> Iterator[None]:
    """Start engines with these parts changed."""
    from torch._inductor import config

    torch._dynamo.reset()
    with ExitStack() as stack:
        if "pdl" in parts:
            stack.enter_context(patch.object(config.triton, "enable_pdl", True))
        if "fused" in parts:
            stack.enter_context(patch.object(Attention, "forward", fused_forward))
        yield


def check(llms: dict[str, LLM], limit: float) -> None:
    """Compare each way's logits with those of the first; raise where they differ too much."""
    for rows in ROWS:
        first: torch.Tensor | None = None
        for name, llm in llms.items():
            logits = llm.runner.execute(decode_batch(rows, 0, 1)).float().clone()
            first = logits if first is None else first
            error = float((logits - first).abs().max() / (first.max() - first.min()))
            print(rows, name, "error in ranges of the logits", f"{error:.1e}", flush=True)
            assert error < limit, (rows, name, error)


def check_kernel(heads: int, kv_heads: int, width: int) -> None:
    """Compare the kernel with the two functions that it replaces."""
    qkv = torch.randn(5, heads + 2 * kv_heads, width)
    angles = torch.outer(torch.arange(20.0), torch.rand(width // 2))
    step = SimpleNamespace(
        positions=torch.tensor([3, 0, 19, 7, 0], dtype=torch.int32),
        slot_mapping=torch.tensor([9, 4, 23, 17, 0], dtype=torch.int32),
    )
    caches = torch.zeros(2, 2, 6, 4, kv_heads, width)
    got = rotate_and_store(qkv, step, angles.cos(), angles.sin(), *caches[0])  # type: ignore[arg-type]
    q, k = rotate(qkv, step.positions, angles.cos(), angles.sin(), heads, kv_heads)
    store_kv(k, qkv[:, heads + kv_heads :], *caches[1], step.slot_mapping)
    torch.testing.assert_close(got, q)
    torch.testing.assert_close(caches[0], caches[1])
    assert caches[0].any()


def start(shape: str, folder: Path, **options: Any) -> dict[str, LLM]:
    """Return an engine for each way, all with the same weights."""
    setup = make_setup(folder, shape=shape, model=None, adapters=0)
    options = {
        "capture_sizes": list(ROWS), "max_num_seqs": ROWS[-1], "max_model_len": 256,
        "num_kv_blocks": 400, "graph_mode": "full", **options,
    }  # fmt: skip
    llms = {}
    for name, parts in WAYS.items():
        with changed(parts):
            llms[name] = setup.llm(enable_lora=False, **options)  # from here on it only replays
    return llms


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="llama-2-7b")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        for heads, kv_heads, width in ((4, 2, 8), (3, 1, 20), (32, 8, 128)):
            check_kernel(heads, kv_heads, width)
        print("right, in Triton's interpreter")
        return
    result: dict[str, Any] = provenance("cuda", " ".join(["python", *sys.argv]), UNIT)
    with tempfile.TemporaryDirectory() as name:
        llms = start(args.shape, Path(name))
    check(llms, 2e-2)
    for rows in ROWS:
        times = replay_times(
            [(m.runner, decode_batch(rows, 0, CONTEXT)) for m in llms.values()], 100
        )
        medians = map(statistics.median, times)
        result[f"{rows} rows"] = {n: round(us, 1) for n, us in zip(llms, medians, strict=True)}
        print(rows, result[f"{rows} rows"], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
