"""The one place of tolerances: how far logits may be from the oracle's, by dtype.

An error is measured relative to the range (largest minus smallest) of the expected logits of its
row, because that is what separates one token from another.

Where the values come from: transformers + PEFT against the float64 oracle, worst element of all,
with `make_tiny_llama` (also grouped heads, explicit head_dim, biases, tied), the base and
`make_tiny_adapter` on every module at ranks 1 to 64, prompts of 1, 30 and 200 tokens, on a CPU
(torch 2.13, transformers 5.24, peft 0.21):

| dtype    | median row | worst, 2 layers | + rsLoRA of rank 16 | worst, 12 layers | allowed |
|----------|------------|-----------------|---------------------|------------------|---------|
| float32  | 4e-7       | 1.8e-6          | 2.9e-6              | 3.6e-6           | 1e-4    |
| float16  | 1.2e-3     | 8.5e-3          | 1.8e-2              | 9.9e-3           | 2e-2    |
| bfloat16 | 8e-3       | 3.2e-2          | 4.4e-2              | 6.5e-2           | 6e-2    |

For scale: with an adapter on every module, another adapter's answer is off by about half of the
range, and one module of one layer left out by 0.05 to 0.3. So half precision shows coarse faults,
and float32 all of them.

A random model amplifies rounding, the more the deeper it is and the larger its adapter: with
rsLoRA of rank 16 the scaling is four times the usual. Half-precision tests use two layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

LOGIT_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ``|actual - expected|`` in units of the range of each expected row, float64.

    Args:
        actual: logits ``[..., vocab]``.
        expected: the same shape; a last dimension is a row.
    """
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    spread = expected.amax(-1, keepdim=True) - expected.amin(-1, keepdim=True)
    error = (actual - expected).abs()
    return torch.where(error == 0, 0.0, error / spread)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str = "logits"
) -> None:
    """Assert that logits agree with the expected ones as well as `dtype` allows.

    Args:
        actual: logits ``[..., vocab]`` of any dtype.
        expected: the oracle's, of the same shape.
        dtype: that the weights and activations behind `actual` had.
        what: named in the message.

    Raises:
        AssertionError: with the worst row and element, or the first one that is not finite.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {[*actual.shape]}, expected {[*expected.shape]}")
    if actual.numel() == 0:
        return
    error = relative_error(actual, expected).reshape(-1, actual.shape[-1])
    allowed = LOGIT_TOLERANCE[dtype]
    bad_rows = int((~(error <= allowed)).any(-1).sum())  # written so that NaN is bad
    if bad_rows == 0:
        return
    worst = int(torch.where(error.isnan(), torch.inf, error).argmax())
    row, element = divmod(worst, error.shape[-1])
    got, want = float(actual.flatten()[worst]), float(expected.flatten()[worst])
    raise AssertionError(
        f"{what}: {bad_rows} of {len(error)} rows are off by more than {allowed:g} of their range "
        f"({dtype}); the worst is row {row}, element {element}: {got:g}, expected {want:g}, "
        f"off by {float(error.flatten()[worst]):.2g} of the range"
    )
