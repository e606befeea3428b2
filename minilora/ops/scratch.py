"""Scratch memory of op bodies, which a test can have filled with NaN.

A graph recorder sees a custom op as one launch; memory that its body takes with `torch.empty`
would hold whatever was there, often zeros, so that a missing reset shows only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_filling: ContextVar[bool] = ContextVar("minilora_fill_scratch", default=False)


def empty(
    shape: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return unwritten memory; within `filled`, memory that holds NaN or huge integers."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return poison_(tensor) if _filling.get() else tensor


def blank(
    shape: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the same, but zeros outside of `filled`: equal from call to call where unread."""
    tensor = torch.zeros(shape, dtype=dtype, device=device)
    return poison_(tensor) if _filling.get() else tensor


@contextmanager
def filled() -> Iterator[None]:
    """Fill what `empty` returns."""
    token = _filling.set(True)
    try:
        yield
    finally:
        _filling.reset(token)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with what nobody takes for a result: NaN, the largest integer, True."""
    if tensor.is_complex():
        return tensor.fill_(complex(math.nan, math.nan))
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
