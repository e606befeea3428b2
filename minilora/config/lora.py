"""`LoRARequest`: which adapter a prompt wants."""

from __future__ import annotations

import os

_VLLM_OPTIONS = {"lora_name", "lora_int_id", "lora_path", "lora_local_path"}


class LoRARequest:
    """The adapter for one prompt: its `name`, and the PEFT folder it is read from.

    The first use of a name loads it. The same name and path opens no file again;
    the same name with another path is a reload (a new version, see `AdapterSlots`).
    `path` may be left out for an adapter that is loaded already.

    vLLM's class takes ``(lora_name, lora_int_id, lora_path)``. minilora needs no integer id,
    so that form is refused with a sentence that shows the right one.

    Raises:
        TypeError: for vLLM's form, or arguments that are no text.

    Examples:
        >>> LoRARequest("sql", "adapters/sql").name
        'sql'
        >>> LoRARequest("sql", 1, "adapters/sql")
        Traceback (most recent call last):
        ...
        TypeError: LoRARequest takes a name and a path, no integer id: write ...
    """

    __slots__ = ("name", "path")

    def __init__(
        self,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *rest: object,
        **options: object,
    ) -> None:
        unknown = set(options) - _VLLM_OPTIONS
        if unknown:
            raise TypeError(f"LoRARequest has no option {min(unknown)!r}; it takes name and path")
        if rest or options or isinstance(path, int):
            texts = [x for x in (name, path, *rest, *options.values()) if _is_text(x)]
            own, folder = [str(text) for text in (*texts, "PATH", "PATH")[:2]]
            raise TypeError(
                f"LoRARequest takes a name and a path, no integer id: "
                f"write LoRARequest({own!r}, {folder!r})"
            )
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"LoRARequest name={name!r} must be a text that is not empty")
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"LoRARequest path={path!r} must be the path of an adapter folder")
        self.name = name
        self.path = None if path is None else _as_path(path)

    def __repr__(self) -> str:
        return f"LoRARequest({self.name!r}, {self.path!r})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, LoRARequest)
        return same and (self.name, self.path) == (other.name, other.path)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.name, self.path))


def _as_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    try:
        os.fsencode(text)
        if isinstance(text, str) and "\0" not in text:
            return text
    except UnicodeEncodeError:
        pass
    raise TypeError(f"LoRARequest path={text!r} is no path that a file can have")


def _is_text(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))
