"""The LoRA kernels for GPUs, in Triton. This package imports where Triton does not exist.

Read in this order: `routing` (which rows a program works on), `shrink`, `expand` (one kernel
each, and the function that launches it), `launch` (block sizes, from measured tables in
`configs/`), `shrink_atomic` (the classical way, kept for comparison).
"""

from __future__ import annotations

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None

__all__ = ["HAS_TRITON"]
