"""Checks shared by every class of options: exact keywords, types and ranges."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from minilora.config.errors import ConfigError, UnknownOptionError, nearest, shown

T = TypeVar("T")


def strict_keywords(cls: type[T], shown_as: str = "") -> type[T]:
    """Class decorator for a dataclass: an unknown keyword names the nearest valid one.

    `shown_as` is what the message calls the class, if that is not its name.
    """
    plain_init: Callable[..., None] = cls.__init__
    known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(plain_init)
    def checked_init(self: T, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise UnknownOptionError(
                    f"{shown_as or cls.__name__} has no option {name!r}{nearest(name, known)}"
                )
        plain_init(self, *args, **options)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls


def check_int(where: str, name: str, value: Any, low: int, high: int) -> int:
    """Return `value`, NumPy's too, as an int if it is one in ``low..high``.

    Raises:
        ConfigError: it is not.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"{where}{name}={shown(value)} must be an integer from {low} to {high}")
    return number


def check_number(where: str, name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a float if it is a finite number in ``low..high``; raise otherwise."""
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if not number or not low <= value <= high:  # a NaN is in no range
        raise ConfigError(f"{where}{name}={shown(value)} must be a number from {low:g} to {high:g}")
    return float(value)


def check_bool(where: str, name: str, value: Any) -> bool:
    """Return `value` if it is a bool; raise a `ConfigError` otherwise."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}{name}={shown(value)} must be true or false")
    return value


def check_choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; raise a `ConfigError` otherwise."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{where}{name}={shown(value)} must be one of {allowed}{hint}")
    return str(value)


def check_path(where: str, name: str, value: Any) -> str:
    """Return a path as text; raise a `ConfigError` for anything else."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ConfigError(f"{where}{name}={shown(value)} must be the path of a folder")
    return os.fspath(value)
