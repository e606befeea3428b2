"""The element-wise maths between the matrix products: four functions that a compiler can fuse.

Each is plain PyTorch and means the same compiled or not. Only these are compiled, not the model
around them: they take tensors alone, so that no buffer size, no flag and no number of adapters
can be baked into compiled code (each of which happened in vLLM #14626). The number of rows is
dynamic from the first call on; one row is a compilation of its own, as for any compiled function.

Legend: T rows, H hidden, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

_COMPILATIONS = 1024  # of one function, over all engines of a process: dtypes and widths differ


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row of ``[T, H]`` by its root mean square (arXiv:1910.07467), in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm(x + delta)`` and ``x + delta``, the residual stream after a layer."""
    x = x + delta
    return rms_norm(x, weight, eps), x


def rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, the two halves of each head rotated (arXiv:2104.09864), in float32.

    q and k are cut out in here: a compiler takes the place where a slice begins for a size, and
    if it happens to equal another one, for the same size.

    Args:
        qkv: ``[T, Hq + 2 Hkv, D]``.
        positions: int ``[T]``, at the start of its memory, for the same reason.
        cos: float32 ``[length, D / 2]``, by position.
        sin: as `cos`.
        heads: Hq, query heads.
        kv_heads: Hkv, key heads.

    Returns:
        ``[T, Hq, D]`` and ``[T, Hkv, D]``.
    """
    c, s = cos[positions][:, None], sin[positions][:, None]  # [T, 1, D/2]
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    return _rotated(q, c, s), _rotated(k, c, s)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(halves, dim=-1).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``[T, 2 I]`` (SwiGLU, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class Fused:
    """The four functions, compiled or as they are.

    Args:
        compiled: use `torch.compile`.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        choose = _compiled if compiled else _plain
        self.rms_norm = choose(rms_norm, rows=1)
        self.add_rms_norm = choose(add_rms_norm, rows=2)
        self.rotate = choose(rotate, rows=2)
        self.silu_and_mul = choose(silu_and_mul, rows=1)


def _plain(fn: Callable[..., Any], rows: int) -> Callable[..., Any]:
    return fn


def _compiled(fn: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Compile a function whose first `rows` arguments have a row for each token."""
    import torch._dynamo as dynamo

    # Beyond its limits dynamo gives up.
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo.config, limit, max(getattr(dynamo.config, limit), _COMPILATIONS))
    run = torch.compile(fn, fullgraph=True)

    def call(*args: Any) -> Any:
        for tensor in args[:rows]:
            # Else the first size seen is a constant: 8192 of 8192 rows, say (vLLM #14626).
            dynamo.maybe_mark_dynamic(tensor, 0)
        return run(*args)

    return call


def num_compilations() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
