"""`GraphDispatcher`: which graphs there are, and which one a step runs with.

A graph is captured for a number of rows and a number of active adapters; a step takes the
smallest one that has room for its own. Rows beyond the step's are padding, groups beyond its
adapters exit at once. The adapter counts are those of vLLM #32005, with one difference: a row
without an adapter is no group, so it is in no count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minilora.batch import BatchDescriptor, GraphMode
from minilora.config.capture_sizes import check_capture_sizes, default_sizes
from minilora.config.checks import check_choice
from minilora.config.engine import GRAPH_MODES

_WHERE = "GraphDispatcher: "
MOST_PIECEWISE_TOKENS = 512  # beyond, a step is long enough to hide its launches


@dataclass(frozen=True)
class GraphKey:
    """What a graph is looked up by.

    Attributes:
        mode: `GraphMode.NONE` where a step runs without a graph.
        descriptor: the rows and adapters that it was captured for.
    """

    mode: GraphMode
    descriptor: BatchDescriptor


class GraphDispatcher:
    """Decide which graphs to capture, and choose one for each step.

    Args:
        graph_mode: "full", "piecewise", "full_and_piecewise" or "none".
        max_num_seqs: the most requests of a step.
        max_num_batched_tokens: the most tokens of a step.
        max_loras: adapter slots; 0 without LoRA.
        capture_sizes: rows to capture; None takes 1, 2, 4, steps of 8 to 256, then of 16, up to
            `max_num_seqs` (FULL) and at most 512 tokens (PIECEWISE).
        specialize_lora: steps without adapters have graphs of their own, without LoRA ops
            (vLLM #25914).
        specialize_active_lora: graphs by number of adapters (vLLM #32005); otherwise every grid
            has the most adapters that its rows can have.

    Raises:
        ConfigError: there is no such `graph_mode`; `capture_sizes` is not ascending, or has a
            size out of range.

    Attributes:
        keys: the graphs to capture, largest first, so that the first one sizes the shared pool.

    Examples:
        >>> dispatcher = GraphDispatcher(
        ...     graph_mode="full", max_num_seqs=8, max_num_batched_tokens=32, max_loras=4
        ... )
        >>> dispatcher.dispatch(num_tokens_real=3, num_real_loras=2, uniform=True).descriptor
        BatchDescriptor(num_tokens=4, num_active_loras=2, uniform=True)
    """

    def __init__(
        self,
        *,
        graph_mode: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int,
        capture_sizes: Sequence[int] | None = None,
        specialize_lora: bool = True,
        specialize_active_lora: bool = True,
    ) -> None:
        check_choice(_WHERE, "graph_mode", graph_mode, GRAPH_MODES)
        self.graph_mode = graph_mode
        self._full = graph_mode in ("full", "full_and_piecewise")
        self._piecewise = graph_mode in ("piecewise", "full_and_piecewise")
        self._max_num_seqs, self._max_loras = max_num_seqs, max_loras
        self._max_tokens = max_num_batched_tokens
        self._capture_sizes: tuple[int, ...] | None = None
        if capture_sizes is not None:
            self._capture_sizes = check_capture_sizes(
                capture_sizes, graph_mode, max_num_seqs, max_num_batched_tokens, _WHERE
            )
        self._specialize_lora = specialize_lora
        self._specialize_active_lora = specialize_active_lora
        self.keys: list[GraphKey] = []
        self.initialize()

    def initialize(self) -> None:
        """Make the keys from the options, whatever there was before."""
        self.reset()
        full = self._sizes(self._max_num_seqs) if self._full else []
        most = min(self._max_tokens, MOST_PIECEWISE_TOKENS)
        piecewise = self._sizes(most, self._max_tokens) if self._piecewise else []
        covered = full[-1] if full else 0  # up to here, uniform steps run FULL
        keys = [self._key(GraphMode.FULL, rows, n) for rows in full for n in self._counts(rows)]
        for rows in piecewise:
            # A step that is not uniform has a request with two rows or more.
            requests = rows if covered < min(rows, self._max_num_seqs) else rows - 1
            counts = self._counts(requests) if requests else []
            if self._full:
                # The counts between would double these graphs, and their steps are prefills:
                # there an idle group costs next to nothing (docs/decisions.md).
                counts = [count for count in counts if count in (0, counts[-1])]
            keys += [self._key(GraphMode.PIECEWISE, rows, count) for count in counts]
        self._take(keys)

    def reset(self) -> None:
        """Forget all keys: every step runs without a graph until `initialize`."""
        self._take([])

    def drop(self, keys: Iterable[GraphKey]) -> None:
        """Forget some keys; their steps take larger graphs, or none."""
        dropped = set(keys)
        self._take([key for key in self.keys if key not in dropped])

    def dispatch(self, num_tokens_real: int, num_real_loras: int, uniform: bool) -> GraphKey:
        """Return the smallest graph for a step; of mode NONE if there is none.

        Args:
            num_tokens_real: the step's rows.
            num_real_loras: its distinct adapters, rows without one not counted.
            uniform: every request has one row.
        """
        modes = (GraphMode.FULL, GraphMode.PIECEWISE) if uniform else (GraphMode.PIECEWISE,)
        for mode in modes:
            sizes = self._sizes_of[mode]
            for place in range(bisect_left(sizes, num_tokens_real), len(sizes)):
                counts = self._counts_of[mode, sizes[place]]
                if num_real_loras <= counts[-1]:
                    count = counts[bisect_left(counts, num_real_loras)]
                    return self._key(mode, sizes[place], count)
        if num_real_loras > self._eager_counts[-1]:
            raise ValueError(
                f"a step has {num_real_loras} adapters, but no more than {self._eager_counts[-1]} "
                "can be active"
            )
        count = self.eager_counts[bisect_left(self.eager_counts, num_real_loras)]
        return GraphKey(GraphMode.NONE, BatchDescriptor(num_tokens_real, count, uniform))

    @property
    def eager_counts(self) -> list[int]:
        """The grids of steps without a graph: rounded up too, so that few kernels are needed."""
        return self._eager_counts

    def _sizes(self, limit: int, most: int | None = None) -> list[int]:
        if self._capture_sizes is None:
            return default_sizes(limit)
        return [size for size in self._capture_sizes if size <= (most or limit)]

    def _counts(self, rows: int) -> list[int]:
        """Return the adapter counts to capture for that many rows (or requests)."""
        bound = min(self._max_loras, rows, self._max_num_seqs)
        if bound == 0:
            return [0]
        counts = [1 << k for k in range(bound.bit_length()) if 1 << k < bound]
        counts = [*counts, bound] if self._specialize_active_lora else [bound]
        return [0, *counts] if self._specialize_lora else counts

    def _key(self, mode: GraphMode, rows: int, count: int) -> GraphKey:
        return GraphKey(mode, BatchDescriptor(rows, count, mode is GraphMode.FULL))

    def _take(self, keys: list[GraphKey]) -> None:
        def size(key: GraphKey) -> tuple[int, int, bool]:
            d = key.descriptor
            return d.num_tokens, d.num_active_loras, key.mode is GraphMode.FULL

        self.keys = sorted(keys, key=size, reverse=True)
        self._eager_counts = self._counts(self._max_loras) if self._max_loras else [0]
        self._sizes_of: dict[GraphMode, list[int]] = {}
        self._counts_of: dict[tuple[GraphMode, int], list[int]] = {}
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
            own = [key.descriptor for key in keys if key.mode is mode]
            self._sizes_of[mode] = sorted({d.num_tokens for d in own})
            for rows in self._sizes_of[mode]:
                counts = sorted(d.num_active_loras for d in own if d.num_tokens == rows)
                self._counts_of[mode, rows] = counts
