"""What the tests of the attention kernels share: a pool of blocks, and its float64 reference.

The pool is NaN wherever no request owns it, also beside the caches; queries are a slice of a
wider buffer; and beyond its own blocks a request's table names a block of NaN.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minilora.ops.attention import decode_attention
from minilora.ops.triton import HAS_TRITON
from tests.test_attention import TOLERANCE
from tests.triton_cases import CUDA, DEVICE, INTERPRET, RUNS

if RUNS:
    from minilora.ops.triton.decode import decode

MIXED = [0, 1, 15, 16, 17, 500]

interpreter = pytest.mark.skipif(
    not HAS_TRITON or CUDA or INTERPRET, reason="runs on a CPU with Triton"
)


def run_under_the_interpreter(file: str) -> None:
    """Start pytest on a file again, with the interpreter on before triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", file],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@dataclass
class Case:
    """Requests with contexts of some lengths, and one new query each."""

    lens: Sequence[int]
    group: int = 2
    kv_heads: int = 2
    width: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0
    columns: int = 0  # of the tables, at least

    def __post_init__(self) -> None:
        self.gen = torch.Generator(device=DEVICE).manual_seed(self.seed)
        self.scale = self.width**-0.5
        rows, heads = len(self.lens), self.group * self.kv_heads
        cache_dtype = self.cache_dtype or self.dtype
        shape = rows, heads + 2 * self.kv_heads, self.width
        qkv = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        qkv[:, :heads] = self.normal(rows, heads, self.width)
        self.q = qkv[:, :heads]
        self.context_lens = torch.tensor(self.lens, dtype=torch.int32, device=DEVICE)
        self.slots = self._place()
        shape = self.num_blocks, self.block_size, self.kv_heads, self.width
        pool = torch.full((2, 2, *shape), torch.nan, dtype=cache_dtype, device=DEVICE)
        self.k_cache, self.v_cache = pool[1]  # the second of two layers
        self.k = [self.normal(n, self.kv_heads, self.width).to(cache_dtype) for n in self.lens]
        self.v = [self.normal(n, self.kv_heads, self.width).to(cache_dtype) for n in self.lens]
        for slots, k, v in zip(self.slots, self.k, self.v, strict=True):
            self.k_cache.flatten(0, 1)[slots] = k
            self.v_cache.flatten(0, 1)[slots] = v

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.gen, device=DEVICE)

    def _place(self) -> list[torch.Tensor]:
        """Hand out blocks in random order, and return the slots of each request's tokens."""
        needed = [-(-n // self.block_size) for n in self.lens]
        self.num_blocks = sum(needed) + 2  # block 0 and the last one are nobody's
        free = random.Random(self.seed).sample(range(1, sum(needed) + 1), sum(needed))
        tables = torch.full((len(needed), max(1, self.columns, *needed)), self.num_blocks - 1)
        slots = []
        for row, (n, count) in enumerate(zip(self.lens, needed, strict=True)):
            tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            position = torch.arange(n)
            block = tables[row, position // self.block_size]
            slots.append((block * self.block_size + position % self.block_size).to(DEVICE))
        self.block_tables = tables.to(DEVICE, torch.int32)
        return slots

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens

    def run(self, splits: int | None = None, longest: int | None = None) -> torch.Tensor:
        bound = max(self.lens) if longest is None else longest
        return decode(*self.tensors, bound, self.scale, splits)

    def plain(self) -> torch.Tensor:
        """What the body without kernels says."""
        tensors = [x.cpu() for x in self.tensors]
        got: torch.Tensor = decode_attention(*tensors, max(self.lens), self.scale)
        return got

    def expected(self, row: int) -> torch.Tensor:
        """What a row gets, ``[Hq, D]`` in float64."""
        q = self.q[row].double().unflatten(0, (self.kv_heads, self.group))
        scores = torch.einsum("hgd,nhd->hgn", q, self.k[row].double()) * self.scale
        mixed = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), self.v[row].double())
        return mixed.flatten(0, 1)

    def check(self, got: torch.Tensor) -> None:
        assert got.shape == self.q.shape
        assert got.dtype == self.dtype
        assert got.is_contiguous()
        for row, n in enumerate(self.lens):
            if n == 0:
                assert torch.equal(got[row], torch.zeros_like(got[row]))
                continue
            error = (got[row].double() - self.expected(row)).abs().max()
            limit = TOLERANCE[self.dtype] * self.v[row].double().abs().max()
            assert error <= limit, f"row {row}, context {n}: off by {error:.2g}"

    def check_against_plain(self, got: torch.Tensor) -> None:
        limit = 2 * TOLERANCE[self.dtype] * max(float(v.abs().max()) for v in self.v if len(v))
        torch.testing.assert_close(got.cpu(), self.plain(), rtol=0, atol=limit)
