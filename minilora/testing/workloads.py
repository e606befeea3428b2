"""Named workloads: which adapter each row of a batch uses. Shared by tests and benchmarks.

| name | rows go to |
|---|---|
| none | no adapter |
| identical | one adapter |
| distinct | as many adapters as there are, one row each, in turn when rows are more |
| uniform | an adapter drawn evenly |
| zipf | an adapter drawn with weight 1 / rank (its place, from 1) |
| skewed | half of the rows one adapter, the others in turn |
| base_mixed | every second row no adapter, the others in turn |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from minilora.config.errors import ConfigError
from minilora.ops.kernel_meta import NO_LORA


def _uniform(rows: int, adapters: int, rng: random.Random) -> list[int]:
    return rng.choices(range(adapters), k=rows)


def _zipf(rows: int, adapters: int, rng: random.Random) -> list[int]:
    weights = [1 / (place + 1) for place in range(adapters)]
    return rng.choices(range(adapters), weights, k=rows)


def _skewed(rows: int, adapters: int, _: random.Random) -> list[int]:
    others = max(1, adapters - 1)
    return [
        0 if row < (rows + 1) // 2 or adapters == 1 else 1 + (row - (rows + 1) // 2) % others
        for row in range(rows)
    ]


def _base_mixed(rows: int, adapters: int, _: random.Random) -> list[int]:
    return [NO_LORA if row % 2 else row // 2 % adapters for row in range(rows)]


_MAKERS: Mapping[str, Callable[[int, int, random.Random], list[int]]] = {
    "none": lambda rows, adapters, _: [NO_LORA] * rows,
    "identical": lambda rows, adapters, _: [0] * rows,
    "distinct": lambda rows, adapters, _: [row % adapters for row in range(rows)],
    "uniform": _uniform,
    "zipf": _zipf,
    "skewed": _skewed,
    "base_mixed": _base_mixed,
}

WORKLOADS = tuple(_MAKERS)


def workload(name: str, rows: int, adapters: int, seed: int = 0) -> list[int]:
    """Return the adapter (a slot from 0 on) of each row, or -1; the same for the same arguments.

    A workload may use fewer than `adapters` adapters: `identical` uses one, few rows cannot use
    many, and a draw may leave one out.

    Raises:
        ConfigError: an unknown name, or fewer than one row or adapter.

    Examples:
        >>> workload("base_mixed", rows=4, adapters=2)
        [0, -1, 1, -1]
    """
    if name not in _MAKERS:
        raise ConfigError(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
    if rows < 1 or adapters < 1:
        raise ConfigError(f"workload: rows={rows} and adapters={adapters} must be at least 1")
    return _MAKERS[name](rows, adapters, random.Random(f"{name} {seed}"))
