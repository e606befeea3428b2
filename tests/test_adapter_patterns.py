"""Regexes on module names: what `re` matches, in bounded time."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.config import AdapterError
from minilora.lora.patterns import NameMatcher, Pattern

# Short, because `re` itself can need 2^n tries on a name of n letters.
NAMES = ["m.l0.q_o", "lm_a", "a.m.1.lo", "l", "m.o.q", "a1.a.ll", "a\n", ""]
ATOMS = [
    *"alom.01_", r"\.", r"\d", r"\w", r"\W", r"\s", r"\_", r"\b", r"\B", r"\A", r"\Z", "^", "$",
    "[a-l_]", "[^.]", "[]a]", r"[\d.]", r"[^\]m]",
]  # fmt: skip
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{1,3}", "{0}", "{1,2}?"]


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.tuples(
        st.sampled_from(["(", "(?:", "(?=", "(?!"]), st.lists(inner, min_size=1, max_size=3)
    )
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        groups.map(lambda parts: f"{parts[0]}{'|'.join(parts[1])})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
        st.tuples(st.sampled_from(ATOMS[:12]), st.sampled_from(REPEATS)).map("".join),
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS), compound, max_leaves=10)


@settings(max_examples=1000, deadline=None)
@given(source=PATTERNS)
def test_matches_as_re_does(source: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        pattern, matcher = Pattern(source), NameMatcher()
        for name in NAMES:
            assert matcher.fullmatch(pattern, name) == bool(re.fullmatch(source, name)), name
            tail = re.match(rf"(?:.*\.)?(?:{source})\Z", name)
            assert matcher.matches_tail(pattern, name) == bool(tail), name
            for end in range(len(name)):
                part = re.match(rf"(?:^|.*?\.)(?:{source})(?=(?s:.{{{len(name) - end}}})\Z)", name)
                assert matcher.matches_tail(pattern, name, end) == bool(part), (name, end)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("(", "'(' is no regex"),
        ("a{2,1}", "is no regex"),
        ("a**", "is no regex"),
        ("a{" + "9" * 30 + "}", "is no regex"),
        (r"(a)\1", r"uses '\\1', which is not supported"),
        ("(?i)a", "uses '(?i)', which is not supported"),
        ("(?<=a)b", "uses '(?<=', which is not supported"),
        ("(?<!a)b", "uses '(?<!', which is not supported"),
        (r"\n", r"uses '\\n', which is not supported"),
        ("a{b", "uses '{b', which is not supported"),
        ("(?:" * 21 + "a" + ")" * 21, "has groups nested over 20 deep"),
        ("(" * 480 + "a" + ")" * 480, "'((((((("),
        ("a" * 1001, "has 1001 characters; at most 1000 are matched"),
    ],
)
def test_what_is_not_understood_is_refused(source: str, message: str) -> None:
    with pytest.raises(AdapterError) as error:
        Pattern(source)
    assert message in str(error.value)


def test_a_possessive_repeat_is_refused() -> None:
    """Python 3.11 knows it, 3.10 does not; both refuse it here."""
    with pytest.raises(AdapterError, match=r"is no regex|not supported"):
        Pattern("a*+a")


def test_named_groups_are_groups() -> None:
    assert NameMatcher().fullmatch(Pattern(r"(?P<layer>\d+)\.q"), "12.q")


def test_a_plain_name_costs_no_steps() -> None:
    """A rank of its own for every module of a large model: 882 x 882 matches."""
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(300)]
    matcher = NameMatcher(max_steps=0)
    patterns = [Pattern(name) for name in names]
    found = [[p.source for p in patterns if matcher.matches_tail(p, name)] for name in names]
    assert found == [[name] for name in names]


def test_steps_are_limited() -> None:
    matcher = NameMatcher(max_steps=100)
    with pytest.raises(AdapterError, match="too many steps"):
        matcher.fullmatch(Pattern(".*" * 200 + "x"), "model.layers.0.mlp.up_proj")
    with pytest.raises(AdapterError, match="too many steps"):
        NameMatcher(100).fullmatch(Pattern("(?:){1000}"), "a")
