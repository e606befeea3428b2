"""The named workloads: who is in them, and that they never change by themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from minilora.config.errors import ConfigError
from minilora.testing.workloads import WORKLOADS, workload


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("rows", "adapters"), [(1, 1), (3, 1), (1, 4), (8, 4), (64, 16)])
def test_every_workload_has_its_rows_and_no_other_adapters(
    name: str, rows: int, adapters: int
) -> None:
    slots = workload(name, rows, adapters)
    assert len(slots) == rows
    assert set(slots) <= {-1, *range(adapters)}
    assert slots == workload(name, rows, adapters)


def test_what_the_names_mean() -> None:
    assert workload("none", 3, 4) == [-1, -1, -1]
    assert workload("identical", 3, 4) == [0, 0, 0]
    assert workload("distinct", 6, 4) == [0, 1, 2, 3, 0, 1]
    assert workload("skewed", 8, 4) == [0, 0, 0, 0, 1, 2, 3, 1]
    assert workload("base_mixed", 8, 3) == [0, -1, 1, -1, 2, -1, 0, -1]
    assert workload("uniform", 32, 4) != workload("uniform", 32, 4, seed=1)
    drawn = Counter(workload("zipf", 4000, 4))
    assert 1.8 < drawn[0] / drawn[1] < 2.2
    assert 3.5 < drawn[0] / drawn[3] < 4.5
    even = Counter(workload("uniform", 4000, 4))
    assert max(even.values()) < 1.2 * min(even.values())


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="'even' is not one of none, identical"):
        workload("even", 8, 4)
    for rows, adapters in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            workload("uniform", rows, adapters)
