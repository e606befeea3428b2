"""Flags made from the fields of `EngineConfig` and `SamplingParams`, in kebab case."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

_TYPES = {"int": int, "float": float, "str": str}


def add_flags(parser: argparse.ArgumentParser, title: str, cls: type, leave_out: set[str]) -> None:
    """Add a flag for every field of an options dataclass; a boolean has a ``--no-`` form too.

    A flag that is not given is left out of the result, so that the dataclass's own default
    and checks apply.
    """
    group = parser.add_argument_group(title)
    described = _attribute_docs(cls)
    for field in dataclasses.fields(cls):
        if not field.init or field.name in leave_out:
            continue
        flag = "--" + field.name.replace("_", "-")
        help_text = described.get(field.name, "")
        if field.default is not None:
            default: Any = field.default
            if isinstance(default, bool):
                default = "on" if default else "off"
            help_text += f" (default: {default})"
        kind = str(field.type).split(" | ")[0]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        elif kind in _TYPES:
            options |= {"type": _TYPES[kind], "metavar": kind.upper()}
            if "Sequence[str]" in str(field.type):
                help_text = f"{help_text} (repeatable)"
                options |= {"action": "append", "metavar": "TEXT", "help": help_text}
        else:  # a sequence of numbers
            options |= {"type": int, "nargs": "+", "metavar": "INT"}
        group.add_argument(flag, **options)


def given(args: argparse.Namespace, cls: type, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return the flags of `cls` that were given, by field name."""
    names = {field.name for field in dataclasses.fields(cls)} - set(leave_out)
    return {name: value for name, value in vars(args).items() if name in names}


def _attribute_docs(cls: type) -> dict[str, str]:
    """Read the "Attributes" section of a docstring: field name -> its text, in one line.

    None, which cannot be typed, is a flag that is not given.
    """
    _, _, section = (cls.__doc__ or "").partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {
        name: _without_none(" ".join(text.split())).replace("%", "%%").replace("`", "")
        for name, text in entries
    }


def _without_none(text: str) -> str:
    return re.sub(r"\bNone\b", "not given", re.sub(r"(^|\. )None\b", r"\1Not given", text))
