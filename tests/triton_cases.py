"""What the tests of the Triton kernels share: one call of both, and its float64 reference."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minilora.ops import KernelMeta
from minilora.ops.triton import HAS_TRITON

CUDA = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = HAS_TRITON and (CUDA or INTERPRET)
DEVICE = "cuda" if CUDA and not INTERPRET else "cpu"

if RUNS:
    from minilora.ops.triton.expand import expand
    from minilora.ops.triton.launch import Routing
    from minilora.ops.triton.shrink import shrink

kernels = pytest.mark.skipif(not RUNS, reason="no GPU, and not under Triton's interpreter")
gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")

# Relative to the update's own norm; the rounding of the output is outside of it (see `error`).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 2e-4}


@dataclass
class Case:
    """One call of both kernels. `mapping` gives each row's slot, -1 for none."""

    mapping: Sequence[int]
    width: int = 96
    outs: Sequence[int] = (40,)
    rank: int = 8
    slots: int = 4
    ranks: Sequence[int] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    groups: int | None = None  # of the grid; None: exactly the real ones

    def __post_init__(self) -> None:
        gen = torch.Generator(device=DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen, device=DEVICE).to(self.dtype)

        rows = len(self.mapping)
        self.x = normal(rows, self.width)
        self.a = [normal(self.slots, self.rank, self.width) / self.width**0.5 for _ in self.outs]
        self.b = [normal(self.slots, out, self.rank) for out in self.outs]
        self.out = normal(rows, sum(self.outs))
        self.lora_ranks = None
        if self.ranks is not None:
            self.lora_ranks = torch.tensor(self.ranks, dtype=torch.int32, device=DEVICE)
            for slot, rank in enumerate(self.ranks):
                for a, b in zip(self.a, self.b, strict=True):
                    a[slot, rank:], b[slot, :, rank:] = torch.nan, torch.nan
        self.meta = KernelMeta(rows, self.slots, DEVICE)
        real = len({slot for slot in self.mapping if slot >= 0})
        self.active = real if self.groups is None else self.groups
        self.meta.prepare(list(self.mapping), rows, max(real, min(self.active, self.slots)))

    @property
    def routing(self) -> Routing:
        m = self.meta
        return Routing(
            m.token_lora_mapping,
            m.token_indices_sorted_by_lora_ids,
            m.active_lora_ids,
            m.num_tokens_per_lora,
        )

    def shrink(self) -> torch.Tensor:
        return shrink(self.x, self.a, self.routing, self.lora_ranks, self.active)

    def expand(self, h: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        expand(h, self.b, out, self.routing, self.lora_ranks, self.active)
        return out

    def run(self) -> torch.Tensor:
        return self.expand(self.shrink(), self.out.clone())

    def update(self) -> torch.Tensor:
        """What is to be added, [T, sum of outs], in float64."""
        update = torch.zeros(self.out.shape, dtype=torch.float64, device=DEVICE)
        slot_of_row = torch.tensor(self.mapping, device=DEVICE)
        for slot in {slot for slot in self.mapping if slot >= 0}:
            rank = self.rank if self.ranks is None else self.ranks[slot]
            rows, column = (slot_of_row == slot).nonzero()[:, 0], 0
            for a, b in zip(self.a, self.b, strict=True):
                h = self.x[rows].double() @ a[slot, :rank].double().T
                update[rows, column : column + b.shape[1]] = h @ b[slot, :, :rank].double().T
                column += b.shape[1]
        return update

    def error(self, got: torch.Tensor) -> float:
        """The error of `got` beyond the one rounding of the output, over the update's norm."""
        want = self.out.double() + self.update()
        half_ulp = torch.finfo(self.dtype).eps / 2
        if INTERPRET and self.dtype == torch.bfloat16:
            half_ulp *= 2  # the interpreter truncates where a GPU rounds to nearest
        beyond = ((got.double() - want).abs() - half_ulp * want.abs() * 1.001).clamp(min=0)
        return (beyond.norm() / self.update().norm().clamp(min=1e-30)).item()

    def check(self) -> None:
        got = self.run()
        assert self.error(got) < TOLERANCE[self.dtype], self.error(got)
        none = [s < 0 or (self.ranks is not None and self.ranks[s] == 0) for s in self.mapping]
        untouched = torch.tensor(none, device=DEVICE)
        assert torch.equal(got[untouched], self.out[untouched])


def mapping_of(rows: int, slots: Sequence[int], seed: int = 0) -> list[int]:
    return random.Random(seed).choices(list(slots), k=rows)


def pairwise(count: int, *choices: Sequence[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Pick `count` of all combinations greedily, so that every pair of values is met early."""
    pool = list(itertools.product(*choices))
    rng = random.Random(seed)
    met: set[tuple[int, object, int, object]] = set()
    picked = []
    for _ in range(count):
        trial = rng.sample(pool, min(60, len(pool)))

        def pairs(case: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
            places = itertools.combinations(range(len(case)), 2)
            return {(i, case[i], j, case[j]) for i, j in places}

        best = max(trial, key=lambda case: len(pairs(case) - met))
        met |= pairs(best)
        picked.append(best)
    return picked


RANKS = [1, 2, 3, 4, 8, 12, 16, 24, 48, 63, 64, 128, 256]
