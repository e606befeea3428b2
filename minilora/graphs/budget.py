"""Which graphs to keep when there is not memory for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minilora.batch import GraphMode
from minilora.graphs.dispatcher import GraphKey


@dataclass(frozen=True)
class GraphCosts:
    """What graphs take, estimated from the largest one of each mode.

    Attributes:
        each: bytes of one graph itself, by mode.
        pool_per_row: bytes of the shared pool for each row of the largest graph.
    """

    each: Mapping[GraphMode, int]
    pool_per_row: float

    def of(self, keys: Iterable[GraphKey]) -> int:
        """Return the bytes of a set of graphs: the largest one's pool, and each one's own."""
        keys = list(keys)
        rows = max((key.descriptor.num_tokens for key in keys), default=0)
        return sum(self.each[key.mode] for key in keys) + round(self.pool_per_row * rows)


def most_useful(keys: Sequence[GraphKey], costs: GraphCosts, limit: int) -> list[GraphKey]:
    """Return the keys to keep within `limit` bytes.

    A key goes in if it still fits, in this order: FULL before PIECEWISE; the counts 0 and the
    largest of a size (every step rounds up to one of them) before those between; the largest
    size and the powers of two before the others; large before small.
    """
    kept: list[GraphKey] = []
    for key in sorted(keys, key=lambda key: _rank(key, keys)):
        if costs.of([*kept, key]) <= limit:
            kept.append(key)
    return kept


def _rank(key: GraphKey, keys: Sequence[GraphKey]) -> tuple[bool, bool, bool, int, int]:
    rows, count = key.descriptor.num_tokens, key.descriptor.num_active_loras
    alike = [other.descriptor for other in keys if other.mode is key.mode]
    most_count = max(other.num_active_loras for other in alike if other.num_tokens == rows)
    most_rows = max(other.num_tokens for other in alike)
    coarse = rows == most_rows or rows & (rows - 1) == 0
    piecewise = key.mode is GraphMode.PIECEWISE
    return piecewise, count not in (0, most_count), not coarse, -rows, count
