"""What a function must not do while it is captured, and how the refusal says where it did it.

CUDA refuses the same, often far from the line that did it; or it does not, and the graph is wrong.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from minilora.graphs.base import CaptureError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_HOST_READS: Mapping[Any, str] = {
    torch.Tensor.tolist: "tolist() reads the tensor on the host",
    torch.Tensor.numpy: "numpy() reads the tensor on the host",
    torch.Tensor.__array__: "numpy reads the tensor on the host",
    torch.Tensor.item: "item() reads the tensor on the host",
    torch.Tensor.__dlpack__: "dlpack hands the tensor's memory to somebody else",
    torch.Tensor.__bool__: "a condition reads the tensor on the host",
    torch.Tensor.cpu: "cpu() copies the tensor to the host",
    torch.tensor: "torch.tensor() copies a constant from the host",
    torch.as_tensor: "torch.as_tensor() copies a constant from the host",
}
_REPOINTS = ("aten::set_", "aten::resize_", "aten::swap_tensors")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::copy")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def where(error: BaseException | None = None) -> str:
    """Return ``file.py:line`` of the innermost frame that is not torch's or the recorder's.

    The frames are those of the caller, or of where an error came from.
    """
    trace = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    for frame in reversed(trace):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "unknown line"


def refuse_host_read(func: Any) -> None:
    """Raise a `CaptureError` if a function of torch reads or writes on the host."""
    try:
        reason = _HOST_READS.get(func)
    except TypeError:  # not hashable, so none of ours
        return
    if reason is not None:
        raise CaptureError(f"{where()}: {reason}; a graph would keep the value of the capture")


def refuse_launch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise a `CaptureError` if a call waits for the device, or is not the same every time."""
    name = func._schema.name
    if name not in _INDEXING and any(tag in func.tags for tag in _DEPENDS_ON_DATA):
        raise CaptureError(
            f"{where()}: {name} takes a number or a shape from the tensor's values; that waits "
            "for the device, and a graph would keep the value of the capture"
        )
    if torch.Tag.inplace_view in func.tags or name in _REPOINTS:
        raise CaptureError(
            f"{where()}: {name} changes which memory a tensor shows, which a graph cannot; make a "
            "new tensor"
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise CaptureError(f"{where()}: {name} draws random numbers; draw them outside the graph")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if name in _INDEXING and any(x.dtype in (torch.bool, torch.uint8) for x in _indices(args)):
        raise CaptureError(
            f"{where()}: indexing with a mask takes a shape from the tensor's values; use "
            "torch.where or masked_fill"
        )
    devices = {x.device for x in tensors}
    if (target := kwargs.get("device")) is not None:
        devices.add(torch.device(target))
    if name in _COPIES and len(devices) > 1:
        raise CaptureError(f"{where()}: {name} copies between devices: {sorted(map(str, devices))}")


def _indices(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
