"""The one place of tolerances: how far logits may be from the oracle's, by dtype.

An error is measured relative to the range (largest minus smallest) of the expected logits of its
row, because that is what separates one token from another. For scale: on the tiny models below,
an adapter that is served in place of another is off by half of the range or more.

Where the values come from: transformers + PEFT against the float64 oracle, worst row of all, with
`make_tiny_llama` (2 and 12 layers; also grouped heads, explicit head_dim, biases, tied), the base
and `make_tiny_adapter` on every module at ranks 1 to 64, prompts of 1, 30 and 200 tokens, on a CPU
(torch 2.13, transformers 5.24, peft 0.21):

| dtype    | 2 layers | 12 layers | allowed | eps of the dtype |
|----------|----------|-----------|---------|------------------|
| float32  | 1.6e-6   | 2.5e-6    | 1e-4    | 1.2e-7           |
| float16  | 4.3e-3   | 7.3e-3    | 1e-2    | 9.8e-4           |
| bfloat16 | 2.4e-2   | 4.4e-2    | 6e-2    | 7.8e-3           |

In half precision most of an error is the rounding of weights and activations, which is the same
for every implementation. An adapter much larger than the model's own weights multiplies it: one
with four times the default `scale` is off by 0.12 in bfloat16, and by 4e-6 in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

LOGIT_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
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
