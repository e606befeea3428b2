"""`Launch`: one call on the tape of a recorded graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from minilora.ops.scratch import poison_

ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass(frozen=True)
class Launch:
    """One call of the tape, with the tensors and numbers of its arguments.

    Attributes:
        func: the overload that is called.
        args: its positional arguments.
        kwargs: its named ones.
        fresh: the tensors it made, by their place among the leaves of its result.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]

    @property
    def name(self) -> str:
        """The op's name, such as "aten::mm"."""
        name: str = self.func._schema.name
        return name

    def run(self) -> None:
        """Make the call again; what it makes goes to the old addresses."""
        if self.name in ALLOCATIONS:
            for _, tensor in self.fresh:
                poison_(tensor)
            return
        result = tree_leaves(self.func(*self.args, **self.kwargs))
        for place, tensor in self.fresh:
            tensor.copy_(result[place])
