"""Regexes of an adapter's config, matched against module names in bounded time.

Python's `re` tries one way to match after another: ``(.+)+x`` takes 2^n tries on a name of n
letters. Here all ways advance together, as the set of positions they have reached (Thompson,
CACM 11(6), 1968), one bit for each position of the name. A name matches here exactly if it
matches with `re`; greedy or lazy makes no difference to that.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from minilora.config.errors import AdapterError

MAX_PATTERN_LENGTH = 1000
MAX_STEPS = 10_000_000  # a few seconds; usual configs need thousands
_MAX_NESTING = 20

# (matcher, name, positions before) -> positions after; position i is bit i.
_Node = Callable[["NameMatcher", str, int], int]
_TOKEN = re.compile(
    r"(?P<open>\((?!\?)|\(\?(?::|=|!|P<\w+>))"
    r"|(?P<close>\))"
    r"|(?P<either>\|)"
    r"|(?P<repeat>[*+?]|\{\d+(?:,\d*)?\}|\{,\d*\})\??"
    r"|(?P<atom>[^\\()|*+?{}\[\]]|\\[\W_bBAZdDsSwW]|\[\^?\]?(?:\\.|[^\]\\])*\])"
)


class Pattern:
    """A checked regex; `ends` says where it can stop.

    Groups, alternatives, classes, repeats, anchors and lookaheads are understood.

    Raises:
        AdapterError: it is too long or nested, is no regex, or uses anything else.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_PATTERN_LENGTH:
            raise AdapterError(
                f"the regex {source[:40]!r}... has {len(source)} characters; "
                f"at most {MAX_PATTERN_LENGTH} are matched"
            )
        try:
            re.compile(source)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(f"{source!r} is no regex: {error}") from None
        self.source = source
        self._node = _Parser(source).parse()
        # A plain name leaves `re` nothing to try again, and thousands of them are usual: a rank
        # of its own for every module of a large model.
        plain = re.fullmatch(r"[\w.]+", source)
        self.plain_tail = re.compile(rf"(?:.*\.)?{source}") if plain else None

    def ends(self, matcher: NameMatcher, name: str, starts: int) -> int:
        """Return every position where a match that begins at one of `starts` can end."""
        return self._node(matcher, name, starts)


class NameMatcher:
    """Matches patterns against names within one budget of steps.

    Raises:
        AdapterError: (any method) all steps are used up.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps_left = max_steps
        self._fits: dict[tuple[str, str], tuple[int, int]] = {}

    def fullmatch(self, pattern: Pattern, name: str) -> bool:
        """Whether all of `name` matches."""
        return bool(pattern.ends(self, name, 1) & 1 << len(name))

    def matches_tail(self, pattern: Pattern, name: str, end: int | None = None) -> bool:
        """Whether a match begins at the start of a dotted part and ends at `end` (or the end)."""
        if pattern.plain_tail is not None and end is None:
            return pattern.plain_tail.fullmatch(name) is not None
        ends = pattern.ends(self, name, _part_starts(name))
        return bool(ends & 1 << (len(name) if end is None else end))

    def spend(self) -> None:
        """Count one step."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise AdapterError("its regexes take too many steps to match; write simpler ones")

    def fits(self, atom: str, name: str) -> tuple[int, int]:
        """Return where `atom` (a character, class or anchor) takes one character, and none."""
        if (atom, name) not in self._fits:
            found = [re.compile(atom).match(name, i) for i in range(len(name) + 1)]
            takes = sum(1 << i for i, m in enumerate(found) if m and m.end() > i)
            stays = sum(1 << i for i, m in enumerate(found) if m and m.end() == i)
            self._fits[atom, name] = takes, stays
        return self._fits[atom, name]


@functools.lru_cache(maxsize=4096)
def _part_starts(name: str) -> int:
    return 1 + sum(2 << i for i, letter in enumerate(name) if letter == ".")


class _Parser:
    """Recursive descent: alternatives of sequences of repeated atoms and groups."""

    def __init__(self, source: str) -> None:
        self._source, self._at, self._depth = source, 0, 0
        self._tokens = self._scan()
        self._kind, self._text = "", ""

    def parse(self) -> _Node:
        self._next()
        return self._alternatives()

    def _scan(self) -> Iterator[tuple[str, str]]:
        while self._at < len(self._source):
            token = _TOKEN.match(self._source, self._at)
            if token is None:
                raise self._not_understood(self._source[self._at : self._at + 4])
            self._at = token.end()
            yield str(token.lastgroup), str(token[str(token.lastgroup)])
        yield "", ""

    def _next(self) -> None:
        self._kind, self._text = next(self._tokens)

    def _not_understood(self, what: str) -> AdapterError:
        return AdapterError(f"the regex {self._source!r} uses {what!r}, which is not supported")

    def _alternatives(self) -> _Node:
        options = [self._sequence()]
        while self._kind == "either":
            self._next()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _either(options)

    def _sequence(self) -> _Node:
        nodes = []
        while self._kind in ("atom", "open"):
            node = self._group() if self._kind == "open" else _atom(self._text)
            self._next()
            if self._kind == "repeat":
                node = _repeat(node, *_counts(self._text))
                self._next()
            nodes.append(node)
        if self._kind == "repeat":  # a possessive one: what it gives up is not a set of positions
            raise self._not_understood(self._text)
        return _sequence(nodes)

    def _group(self) -> _Node:
        opening, self._depth = self._text, self._depth + 1
        if self._depth > _MAX_NESTING:
            raise AdapterError(
                f"the regex {self._source!r} has groups nested over {_MAX_NESTING} deep"
            )
        self._next()
        node = self._alternatives()
        self._depth -= 1
        return _lookahead(node, opening == "(?=") if opening in ("(?=", "(?!") else node


def _counts(text: str) -> tuple[int, int | None]:
    """Return the least and the most times of a repeat; None is no limit."""
    if text[0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    low, comma, high = text[1:-1].partition(",")
    return int(low or 0), int(high) if high else None if comma else int(low)


def _atom(text: str) -> _Node:
    def run(matcher: NameMatcher, name: str, at: int) -> int:
        matcher.spend()
        takes, stays = matcher.fits(text, name)
        return (at & takes) << 1 | at & stays

    return run


def _sequence(nodes: list[_Node]) -> _Node:
    def run(matcher: NameMatcher, name: str, at: int) -> int:
        for node in nodes:
            if not at:
                break
            at = node(matcher, name, at)
        return at

    return run


def _either(options: list[_Node]) -> _Node:
    def run(matcher: NameMatcher, name: str, at: int) -> int:
        reached = 0
        for option in options:
            reached |= option(matcher, name, at)
        return reached

    return run


def _repeat(node: _Node, low: int, high: int | None) -> _Node:
    def run(matcher: NameMatcher, name: str, at: int) -> int:
        rounds, reached, new = 0, 0 if low else at, at
        while new and (high is None or rounds < high):
            matcher.spend()
            new, rounds = node(matcher, name, new), rounds + 1
            if rounds >= low:
                new &= ~reached  # from a position reached before, nothing new can come
                reached |= new
        return reached

    return run


def _lookahead(node: _Node, wanted: bool) -> _Node:
    def run(matcher: NameMatcher, name: str, at: int) -> int:
        bits = [1 << i for i in range(at.bit_length()) if at >> i & 1]
        return sum(bit for bit in bits if bool(node(matcher, name, bit)) == wanted)

    return run
