"""`GraphDispatcher`, against a slow reference that shares nothing with it but the definitions.

A step exists if adapters <= requests <= max_num_seqs and requests <= rows <= the token budget;
it is uniform if rows == requests. The reference lists all such steps and all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.batch import BatchDescriptor, GraphMode
from minilora.config.errors import ConfigError
from minilora.graphs.dispatch_table import dispatch_table
from minilora.graphs.dispatcher import GraphDispatcher, GraphKey

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
MODES = ["full_and_piecewise", "full", "piecewise", "none"]
Step = tuple[int, int, bool]  # rows, adapters, uniform


def make(**options: Any) -> GraphDispatcher:
    usual: dict[str, Any] = {"graph_mode": "full_and_piecewise", "max_num_seqs": 64}
    return GraphDispatcher(**{**usual, "max_num_batched_tokens": 2048, "max_loras": 4, **options})


def pairs(dispatcher: GraphDispatcher, mode: GraphMode) -> list[tuple[int, int]]:
    """(rows, count) of the keys of a mode, ascending."""
    own = [key.descriptor for key in dispatcher.keys if key.mode is mode]
    return sorted((d.num_tokens, d.num_active_loras) for d in own)


def rows_of(dispatcher: GraphDispatcher, mode: GraphMode) -> list[int]:
    return sorted({rows for rows, _ in pairs(dispatcher, mode)})


# ---- the reference


def steps(options: dict[str, Any]) -> Iterator[Step]:
    """Every step that can exist."""
    seqs, loras = options["max_num_seqs"], options["max_loras"]
    for rows in range(1, options["max_num_batched_tokens"] + 1):
        for uniform in (True, False):
            # Without uniformity one request has two rows or more, the others at least one.
            requests = rows if uniform else min(rows - 1, seqs)
            if 1 <= requests <= seqs:
                for adapters in range(min(requests, loras) + 1):
                    yield rows, adapters, uniform


def default_sizes(limit: int) -> set[int]:
    usual = {1, 2, 4} | {n for n in range(8, limit) if n % (8 if n <= 256 else 16) == 0}
    return {n for n in usual if n < limit} | {limit}


def sizes(options: dict[str, Any], mode: GraphMode) -> set[int]:
    seqs, tokens = options["max_num_seqs"], options["max_num_batched_tokens"]
    if mode.value not in options["graph_mode"]:
        return set()
    if options["capture_sizes"] is None:
        return default_sizes(seqs if mode is FULL else min(tokens, 512))
    return {n for n in options["capture_sizes"] if mode is PIECEWISE or n <= seqs}


def rounded(adapters: int, most: int, options: dict[str, Any], mode: GraphMode) -> int:
    """The count that a number of adapters is captured with, where there are at most `most`."""
    if most == 0 or (adapters == 0 and options["specialize_lora"]):
        return 0
    prefills = mode is PIECEWISE and options["graph_mode"] == "full_and_piecewise"
    if prefills or not options["specialize_active_lora"]:
        return most
    power = 1
    while power < adapters:
        power *= 2
    return min(power, most)


def reference_keys(options: dict[str, Any]) -> set[GraphKey]:
    """Send every step to its size; a size's counts follow from the steps that came."""
    arrived: dict[tuple[GraphMode, int], set[int]] = {}
    for rows, adapters, uniform in steps(options):
        fitting = [(FULL, n) for n in sorted(sizes(options, FULL)) if uniform and n >= rows]
        fitting += [(PIECEWISE, n) for n in sorted(sizes(options, PIECEWISE)) if n >= rows]
        if fitting:
            arrived.setdefault(fitting[0], set()).add(adapters)
    return {
        GraphKey(mode, BatchDescriptor(n, count, mode is FULL))
        for (mode, n), counts in arrived.items()
        for count in {rounded(adapters, max(counts), options, mode) for adapters in counts}
    }


def reference_dispatch(keys: Sequence[GraphKey], step: Step, options: dict[str, Any]) -> GraphKey:
    """The first key of all that fit; without one, no graph."""
    rows, adapters, uniform = step

    def fits(key: GraphKey) -> bool:
        d = key.descriptor
        grid = d.num_active_loras >= adapters
        return grid and d.num_tokens >= rows and (uniform or key.mode is PIECEWISE)

    def order(key: GraphKey) -> tuple[bool, int, int]:
        return key.mode is PIECEWISE, key.descriptor.num_tokens, key.descriptor.num_active_loras

    most = min(options["max_loras"], options["max_num_seqs"])
    eager = BatchDescriptor(rows, rounded(adapters, most, options, NONE), uniform)
    return min(filter(fits, keys), key=order, default=GraphKey(NONE, eager))


def check(options: dict[str, Any]) -> None:
    """All that must hold for a set of options."""
    dispatcher = GraphDispatcher(**options)
    keys = dispatcher.keys
    assert len(keys) == len(set(keys))
    assert set(keys) == reference_keys(options)
    check_order_and_bounds(keys, options)
    reached = check_dispatch(dispatcher, options)
    assert reached == set(keys), "a captured graph is for no step"


def check_order_and_bounds(keys: Sequence[GraphKey], options: dict[str, Any]) -> None:
    shapes = [(key.descriptor.num_tokens, key.descriptor.num_active_loras) for key in keys]
    assert shapes == sorted(shapes, reverse=True)
    for key, (rows, count) in zip(keys, shapes, strict=True):
        assert count <= min(options["max_loras"], rows, options["max_num_seqs"])
        assert key.descriptor.uniform == (key.mode is FULL)
        assert key.mode is not FULL or rows <= options["max_num_seqs"]


def check_dispatch(dispatcher: GraphDispatcher, options: dict[str, Any]) -> set[GraphKey]:
    """Dispatch every step; return the graphs that were chosen."""
    reached = set()
    for step in steps(options):
        key = dispatcher.dispatch(*step)
        assert key == reference_dispatch(dispatcher.keys, step, options), step
        assert step[0] <= key.descriptor.num_tokens
        assert step[1] <= key.descriptor.num_active_loras <= options["max_loras"]
        if key.mode is not NONE:
            assert key in dispatcher.keys
            reached.add(key)
    return reached


# ---- properties


@pytest.mark.parametrize("specialize_active_lora", [True, False])
@pytest.mark.parametrize("specialize_lora", [True, False])
@pytest.mark.parametrize("graph_mode", MODES)
def test_all_small_options(
    graph_mode: str, specialize_lora: bool, specialize_active_lora: bool
) -> None:
    lists = [None, [1], [3], [2, 5], [1, 2, 4, 7]]
    for seqs, tokens, loras, given_sizes in itertools.product(
        (1, 2, 3, 5), (1, 2, 5, 9), (0, 1, 2, 3, 6), lists
    ):
        limit = seqs if graph_mode == "full" else tokens
        if tokens >= seqs and (given_sizes is None or given_sizes[-1] <= limit):
            check(
                {
                    "graph_mode": graph_mode,
                    "max_num_seqs": seqs,
                    "max_num_batched_tokens": tokens,
                    "max_loras": loras,
                    "capture_sizes": given_sizes,
                    "specialize_lora": specialize_lora,
                    "specialize_active_lora": specialize_active_lora,
                }
            )


@st.composite
def any_options(draw: st.DrawFn) -> dict[str, Any]:
    seqs = draw(st.integers(1, 40))
    tokens = draw(st.integers(seqs, 70))
    mode = draw(st.sampled_from(MODES))
    limit = seqs if mode == "full" else tokens
    some = st.lists(st.integers(1, limit), min_size=1, max_size=8, unique=True).map(sorted)
    return {
        "graph_mode": mode,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "max_loras": draw(st.integers(0, 12)),
        "capture_sizes": draw(st.none() | some),
        "specialize_lora": draw(st.booleans()),
        "specialize_active_lora": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(any_options())
def test_any_options(options: dict[str, Any]) -> None:
    check(options)


@settings(max_examples=60, deadline=None)
@given(any_options(), st.data())
def test_after_some_keys_were_dropped(options: dict[str, Any], data: st.DataObject) -> None:
    dispatcher = GraphDispatcher(**options)
    before = list(dispatcher.keys)
    flags = data.draw(st.lists(st.booleans(), min_size=len(before), max_size=len(before)))
    dropped = [key for key, drop in zip(before, flags, strict=True) if drop]
    dispatcher.drop(iter(dropped))
    assert dispatcher.keys == [key for key in before if key not in dropped]
    check_dispatch(dispatcher, options)
    dispatcher.initialize()
    assert dispatcher.keys == before


# ---- cases


def test_the_running_example() -> None:
    key = make().dispatch(3, 2, uniform=True)
    assert key == GraphKey(FULL, BatchDescriptor(4, 2, True))


def test_the_usual_sizes() -> None:
    full = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert rows_of(make(), FULL) == full
    piecewise = rows_of(make(), PIECEWISE)
    assert piecewise[:2] == [2, 4], "no step with a prefill has one row"
    assert piecewise[-3:] == [480, 496, 512]
    assert [b - a for a, b in itertools.pairwise(piecewise) if b > 240][:4] == [8, 8, 16, 16]
    assert rows_of(make(max_num_batched_tokens=300), PIECEWISE)[-3:] == [272, 288, 300]


@pytest.mark.parametrize(("most", "last"), [(65, [64, 65]), (257, [256, 257]), (270, [256, 270])])
def test_the_limit_is_a_size(most: int, last: list[int]) -> None:
    assert rows_of(make(max_num_seqs=most), FULL)[-2:] == last


def test_counts_that_are_captured() -> None:
    five = make(max_loras=5, max_num_seqs=8)
    assert [count for rows, count in pairs(five, FULL) if rows == 8] == [0, 1, 2, 4, 5]
    assert [count for rows, count in pairs(five, FULL) if rows == 4] == [0, 1, 2, 4]
    assert [count for rows, count in pairs(five, PIECEWISE) if rows == 4] == [0, 3]
    assert five.dispatch(7, 3, True).descriptor == BatchDescriptor(8, 4, True)
    assert five.dispatch(7, 5, True).descriptor == BatchDescriptor(8, 5, True)


def test_switches_of_the_counts() -> None:
    one = make(specialize_active_lora=False, max_num_seqs=8)
    assert {count for _, count in pairs(one, FULL)} == {0, 1, 2, 4}, "the most that n rows have"
    assert one.dispatch(8, 1, True).descriptor.num_active_loras == 4
    assert one.dispatch(8, 0, True).descriptor.num_active_loras == 0
    always = make(specialize_lora=False)
    assert all(key.descriptor.has_lora for key in always.keys)
    assert always.dispatch(8, 0, True).descriptor.num_active_loras == 1
    neither = make(specialize_lora=False, specialize_active_lora=False)
    assert len(pairs(neither, FULL)) == len(rows_of(neither, FULL))
    assert neither.dispatch(8, 0, True).descriptor.num_active_loras == 4


def test_without_lora_there_is_one_set() -> None:
    off = make(max_loras=0, specialize_lora=False)
    assert not any(key.descriptor.has_lora for key in off.keys)
    assert len(pairs(off, FULL)) == len(rows_of(off, FULL))
    assert off.dispatch(3, 0, True) == GraphKey(FULL, BatchDescriptor(4, 0, True))
    assert off.dispatch(3000, 0, False) == GraphKey(NONE, BatchDescriptor(3000, 0, False))


def test_a_step_without_a_graph_rounds_its_adapters_too() -> None:
    dispatcher = make(max_loras=6)
    counts = [dispatcher.dispatch(600, n, False).descriptor.num_active_loras for n in range(7)]
    assert counts == [0, 1, 2, 4, 4, 6, 6]
    assert dispatcher.eager_counts == [0, 1, 2, 4, 6]
    assert make(graph_mode="none").dispatch(3, 3, True) == GraphKey(
        NONE, BatchDescriptor(3, 4, True)
    )


def test_initialised_again_nothing_is_left_of_the_first_time() -> None:
    dispatcher = make(max_loras=8)
    dispatcher.dispatch(3, 2, True)
    once = list(dispatcher.keys)
    dispatcher.initialize()
    assert dispatcher.keys == once
    other: dict[str, Any] = {
        "graph_mode": "full_and_piecewise",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 20,
        "max_loras": 6,
        "capture_sizes": None,
        "specialize_lora": True,
        "specialize_active_lora": False,  # the first time's counts would fit better
    }
    dispatcher.__init__(**other)  # type: ignore[misc]
    assert set(dispatcher.keys) == reference_keys(other)
    assert len(dispatcher.keys) == len(set(dispatcher.keys))
    check_dispatch(dispatcher, other)
    assert dispatcher.dispatch(8, 1, True) == GraphKey(FULL, BatchDescriptor(8, 6, True))
    assert dispatcher.eager_counts == [0, 6]


def test_reset_forgets_every_key_until_initialize() -> None:
    dispatcher = make()
    before = list(dispatcher.keys)
    dispatcher.reset()
    assert dispatcher.keys == []
    assert dispatcher.dispatch(3, 2, True) == GraphKey(NONE, BatchDescriptor(3, 2, True))
    dispatcher.initialize()
    assert dispatcher.keys == before


def test_the_list_is_the_users_no_longer() -> None:
    given_sizes = [1, 4]
    dispatcher = make(capture_sizes=given_sizes)
    given_sizes.append(2)  # after the check
    dispatcher.initialize()
    assert rows_of(dispatcher, FULL) == [1, 4]


def test_dropping_keys_that_are_not_there_changes_nothing() -> None:
    dispatcher = make()
    before = list(dispatcher.keys)
    dispatcher.drop([GraphKey(FULL, BatchDescriptor(5, 3, True))])
    assert dispatcher.keys == before


# ---- bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture_sizes": []}, r"capture_sizes=\[\] must be a list of one or more sizes; leave"),
        ({"capture_sizes": [4, 2]}, r"capture_sizes=\[4, 2\].* ascend.* 2 follows 4"),
        ({"capture_sizes": [4, 4]}, r"capture_sizes=\[4, 4\].*without repeats.* 4 follows 4"),
        ({"capture_sizes": [0, 4]}, r"capture_sizes=\[0, 4\]: 0 must be"),
        ({"capture_sizes": [1, 2.0]}, r"capture_sizes=.*2\.0 must be an integer"),
        ({"capture_sizes": [2049]}, "2049 is over max_num_batched_tokens=2048.* or raise"),
        ({"capture_sizes": [8, 65], "graph_mode": "full"}, "65 is over max_num_seqs=64.* or raise"),
        ({"capture_sizes": [4, 2], "graph_mode": "none"}, "2 follows 4"),
        ({"graph_mode": "ful"}, "graph_mode='ful' must be one of .*did you mean 'full'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        make(**options)
    assert str(caught.value).startswith("GraphDispatcher: ")


# ---- field reports


@pytest.mark.parametrize("mode", ["full_and_piecewise", "full"])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 9, 12, 17, 20, 100, 200, 300])
def test_g7_the_full_batch_has_a_graph(most: int, mode: str) -> None:
    """nano-vllm 216, vllm-ascend 16049, vLLM 25829: no size for it, or sizes above it."""
    dispatcher = make(max_num_seqs=most, graph_mode=mode)
    assert rows_of(dispatcher, FULL)[-1] == most
    for rows in range(1, most + 1):
        for adapters in range(min(rows, 4) + 1):
            assert dispatcher.dispatch(rows, adapters, True).mode is FULL


def test_g8_a_size_above_the_requests() -> None:
    """vLLM 15308: 56 rows were captured with buffers for 50 requests."""
    both = make(max_num_seqs=50, capture_sizes=[8, 56])
    assert rows_of(both, FULL) == [8]
    assert rows_of(both, PIECEWISE) == [8, 56]
    assert both.dispatch(50, 4, True) == GraphKey(PIECEWISE, BatchDescriptor(56, 4, False))
    with pytest.raises(ConfigError, match=r"capture_sizes=\[8, 56\]: 56 is over max_num_seqs=50"):
        make(max_num_seqs=50, capture_sizes=[8, 56], graph_mode="full")


def test_p3_counts_that_cannot_occur_are_not_captured() -> None:
    """vLLM 36370: 94 s of capture became 29 s."""
    dispatcher = make(max_loras=8, max_num_seqs=1)
    assert pairs(dispatcher, FULL) == [(1, 0), (1, 1)]
    assert {count for _, count in pairs(dispatcher, PIECEWISE)} == {0, 1}
    assert dispatcher.eager_counts == [0, 1]


# ---- the table


@pytest.mark.parametrize("given_sizes", [None, [4, 16]])
@pytest.mark.parametrize("mode", MODES)
def test_the_table_tells_the_truth(mode: str, given_sizes: list[int] | None) -> None:
    seqs, tokens, loras = (16 if mode == "full" else 6), 20, 3
    options: dict[str, Any] = {"graph_mode": mode, "capture_sizes": given_sizes}
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_loras": loras}
    dispatcher = make(**options, **limits)
    table = dispatch_table(dispatcher, tokens, seqs, loras)
    for rows, adapters, uniform in steps({**options, **limits}):
        lines = [
            choice
            for choice in table
            if choice.uniform is uniform
            and choice.rows[0] <= rows <= choice.rows[1]
            and choice.adapters[0] <= adapters <= choice.adapters[1]
        ]
        assert len(lines) == 1, (rows, adapters, uniform)
        chosen = dispatcher.dispatch(rows, adapters, uniform)
        assert lines[0].key.mode is chosen.mode
        if chosen.mode is not NONE:
            assert lines[0].key == chosen
            rows_padded, groups_padded = lines[0].most_padding
            assert chosen.descriptor.num_tokens - rows <= rows_padded
            assert chosen.descriptor.num_active_loras - adapters <= groups_padded


def test_neighbouring_lines_with_one_graph_are_one() -> None:
    eager = dispatch_table(make(graph_mode="none"), 64, 9, 2)
    assert [(line.uniform, line.rows, line.adapters) for line in eager] == [
        (True, (1, 9), (0, 2)), (False, (2, 64), (0, 2)),
    ]  # fmt: skip
    options = {"max_num_seqs": 9, "max_num_batched_tokens": 64, "max_loras": 2}
    table = dispatch_table(make(capture_sizes=[1, 4, 9, 16], **options), 64, 9, 2)
    graphs = [(line.uniform, line.adapters, line.key) for line in table]
    assert len(set(graphs)) == len(graphs)


def test_a_line_of_the_table() -> None:
    table = dispatch_table(make(), 2048, 64, 4)
    line = next(c for c in table if c.uniform and c.rows == (3, 4) and c.adapters == (2, 2))
    assert line.columns() == ("3 to 4", "2", "FULL, 4 rows, 2 groups", "up to 1 row, 0 groups")
