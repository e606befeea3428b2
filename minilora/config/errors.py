"""The errors of minilora: each is one sentence with the field, the value and the way out.

All derive from `MiniloraError`, which is a `ValueError`, so that code written against
vLLM or transformers (both raise `ValueError` for bad input) keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MiniloraError(ValueError):
    """Base class of every error that minilora raises for something the user can mend."""


class ConfigError(MiniloraError):
    """An option, or a field of a `config.json`, is out of range or not supported."""


class UnknownOptionError(ConfigError, TypeError):
    """A keyword that does not exist; the message names the nearest one that does."""


class CheckpointError(MiniloraError):
    """A checkpoint folder is incomplete, damaged, or describes a model minilora cannot run."""


class AdapterError(MiniloraError):
    """An adapter folder is incomplete, damaged, unsupported, or does not fit the model."""


class RequestError(MiniloraError):
    """A prompt or its sampling parameters cannot be served."""


def shown(value: object, most: int = 80) -> str:
    """Return a value as a message shows it: one line, and not longer than `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a huge integer"
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_full_memory(error: BaseException) -> bool:
    """Whether an error says that memory is full: Python's, that of a CPU's tensors, or a GPU's."""
    of_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
    return isinstance(error, MemoryError) or of_gpu or "can't allocate memory" in str(error)


def known_names(names: Iterable[str], most: int = 12) -> str:
    """Return a short, sorted list of names for an error message (``"none"`` where empty)."""
    ordered = sorted(names)
    listed = ", ".join(shown(name, 100) for name in ordered[:most])
    return (listed or "none") + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
