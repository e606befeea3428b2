"""Maths over a vocabulary whose result for a row does not depend on the rows beside it.

What a row gets depends on that row alone, bit for bit. Floating-point sums over the vocabulary
would not allow this: their order changes with the shape of the batch, with a row's place in it,
and on CUDA from run to run (`torch.cumsum`). Probabilities are therefore turned into integer
weights, element by element, and integers add up to the same sum in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Rows x vocabulary worked on at once: about 200 MB of scratch on a GPU, the cache of a CPU.
_MOST_CELLS, _MOST_CELLS_CPU = 1 << 22, 1 << 17


def chunks(count: int, like: torch.Tensor) -> Iterator[slice]:
    """Yield parts of `count` rows that are small enough to be worked on at once."""
    cells = _MOST_CELLS_CPU if like.device.type == "cpu" else _MOST_CELLS
    step = max(1, cells // like.shape[-1])
    return (slice(start, start + step) for start in range(0, count, step))


def likelihood(scores: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Return float64 [R, vocab]: each token's probability over that of the most likely one."""
    shifted = scores.double() - scores.amax(dim=-1, keepdim=True).double()
    return (shifted / temperature).exp_()


def weights(shares: torch.Tensor) -> torch.Tensor:
    """Return what `likelihood` gave as int64 that add up without overflow; 0 for rows with NaN."""
    return (shares.nan_to_num(nan=0.0) * 2.0 ** bits(shares)).round_().long()


def bits(scores: torch.Tensor) -> int:
    """Return how many bits a weight may have, so that a whole vocabulary's sum fits in 62."""
    return 62 - scores.shape[-1].bit_length()


def order(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 [R, vocab] that sorts tokens by score, equal ones by id; no two are equal.

    The bits of a float, with those of a negative one turned round, sort as the float does.
    """
    raw = (scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    rising = torch.where(raw < 0, raw ^ 0x7FFFFFFF, raw)
    vocab = scores.shape[-1]
    return rising * vocab - torch.arange(vocab, device=scores.device)
