"""Capture sizes: the rows that graphs are captured for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from minilora.config.errors import ConfigError, shown


def default_sizes(limit: int) -> list[int]:
    """Return 1, 2, 4, then steps of 8 to 256, then of 16, and `limit` as the last.

    Small steps where padding is a large share of the work, wider ones where it is not.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)]
    return [*(size for size in sizes if size < limit), limit]


def check_capture_sizes(
    sizes: Any,
    graph_mode: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    where: str = "",
) -> tuple[int, ...]:
    """Return the sizes if they are integers, ascending, and within what a step can have.

    Raises:
        ConfigError: naming the first size that is wrong, and the limit.
    """
    text = f"{where}capture_sizes={shown(sizes)}"
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
        raise ConfigError(f"{text} must be a list of one or more sizes; leave it out for the usual")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{text}: {shown(size)} must be an integer of at least 1")
    for before, size in itertools.pairwise(sizes):
        if size <= before:
            raise ConfigError(
                f"{text}: sizes must ascend without repeats, but {shown(size)} follows "
                f"{shown(before)}"
            )
    name, limit = "max_num_batched_tokens", max_num_batched_tokens
    if graph_mode == "full":  # a FULL graph has a row for each request
        name, limit = "max_num_seqs", max_num_seqs
    if sizes[-1] > limit:
        raise ConfigError(
            f"{text}: {shown(sizes[-1])} is over {name}={limit}, the most rows of a step; "
            f"drop it or raise {name}"
        )
    return tuple(sizes)
