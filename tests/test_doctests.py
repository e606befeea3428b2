"""The examples of the reference do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import minilora

FLAGS = doctest.ELLIPSIS
MODULES = [
    module.name
    for module in pkgutil.walk_packages(minilora.__path__, "minilora.")
    if ".triton" not in module.name and not module.name.endswith("__main__")
]
FINDER = doctest.DocTestFinder(exclude_empty=True)
WITH_EXAMPLES = [
    name
    for name in MODULES
    if any(test.examples for test in FINDER.find(importlib.import_module(name)))
]


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) >= 9


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert result.attempted
    assert result.failed == 0
