"""The dispatcher's choices as a table to read: which graph for how many rows and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minilora.batch import GraphMode
from minilora.graphs.dispatcher import GraphDispatcher, GraphKey


@dataclass(frozen=True)
class Choice:
    """One line: steps with these rows and adapters run with this graph.

    Attributes:
        uniform: whether the steps are decode only, one row a request.
        rows: least and most rows of the steps.
        adapters: least and most adapters of the steps.
        key: the graph.
    """

    uniform: bool
    rows: tuple[int, int]
    adapters: tuple[int, int]
    key: GraphKey

    @property
    def most_padding(self) -> tuple[int, int]:
        """The most rows and groups of the graph that are padding; (0, 0) without a graph."""
        if self.key.mode is GraphMode.NONE:
            return 0, 0
        chosen = self.key.descriptor
        return chosen.num_tokens - self.rows[0], chosen.num_active_loras - self.adapters[0]

    def columns(self) -> tuple[str, str, str, str]:
        """Return rows, adapters, the graph and its padding as text."""
        chosen, (rows, groups) = self.key.descriptor, self.most_padding
        if self.key.mode is GraphMode.NONE:
            return _span(self.rows), _span(self.adapters), "none: eager", "-"
        size = f"{_many(chosen.num_tokens, 'row')}, {_many(chosen.num_active_loras, 'group')}"
        padding = f"up to {_many(rows, 'row')}, {_many(groups, 'group')}"
        return _span(self.rows), _span(self.adapters), f"{self.key.mode.name}, {size}", padding


def dispatch_table(
    dispatcher: GraphDispatcher, most_rows: int, most_requests: int, max_loras: int
) -> list[Choice]:
    """Return every choice, decode steps first, neighbouring steps with one graph as one line.

    Args:
        dispatcher: whose choices to show.
        most_rows: the most rows of a step.
        most_requests: the most requests of a step.
        max_loras: adapter slots.
    """
    choices: list[Choice] = []
    for uniform in (True, False):
        limit = most_requests if uniform else most_rows
        before: list[Choice] = []
        for rows in _ranges(dispatcher, limit, start=1 if uniform else 2):
            most = min(max_loras, most_requests, rows[1] if uniform else rows[1] - 1)
            lines = _lines(dispatcher, uniform, rows, most)
            if [_graph(line) for line in before] == [_graph(line) for line in lines]:
                lines = [replace(line, rows=(before[0].rows[0], rows[1])) for line in lines]
                del choices[-len(before) :]
            choices += lines
            before = lines
    return choices


def _lines(
    dispatcher: GraphDispatcher, uniform: bool, rows: tuple[int, int], most: int
) -> list[Choice]:
    """Return the lines of some rows: neighbouring numbers of adapters with one graph as one."""
    lines: list[Choice] = []
    for count in range(most + 1):
        line = Choice(uniform, rows, (count, count), dispatcher.dispatch(rows[1], count, uniform))
        if lines and _graph(lines[-1])[1] == _graph(line)[1]:
            lines[-1] = replace(lines[-1], adapters=(lines[-1].adapters[0], count))
        else:
            lines.append(line)
    return lines


def _graph(line: Choice) -> tuple[tuple[int, int], GraphKey | None]:
    """Return the adapters and the graph of a line, None where steps run without one."""
    return line.adapters, None if line.key.mode is GraphMode.NONE else line.key


def _ranges(dispatcher: GraphDispatcher, limit: int, start: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of row counts between two captured sizes, and what is above the last."""
    sizes = {key.descriptor.num_tokens for key in dispatcher.keys}
    first = start
    for last in sorted({size for size in sizes if size < limit} | {limit}):
        if last >= first:
            yield first, last
            first = last + 1


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _span(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
