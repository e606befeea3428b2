"""`launch_op`: a function becomes an op, one launch to `torch.compile` and to a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def launch_op(
    name: str, fake: Callable[..., Any], mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the body of an op on every device.

    As `torch.library.custom_op` does, without what it puts around each call: checks of gradients
    and aliases, which take longer than many a body here, and a step makes hundreds of calls.
    A device's own kernel is added with `torch.library.impl`.

    Args:
        name: "namespace::name".
        fake: returns tensors like those that the body returns, without values.
        mutates_args: names of the arguments that the body writes.

    Returns:
        A decorator; what it returns is the op (`torch._ops.OpOverload`), called as the function.
    """

    def register(body: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(body, mutates_args=mutates_args)
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", body)
        torch.library.register_fake(name, fake)
        namespace, _, short = name.partition("::")
        return getattr(getattr(torch.ops, namespace), short).default

    return register
