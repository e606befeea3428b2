"""The kernels for GPUs, in Triton. This package imports where Triton does not exist.

LoRA, in this order: `routing` (which rows a program works on), `shrink`, `expand` (one kernel
each, and the function that launches it), `launch` (block sizes, from measured tables in
`configs/`), `shrink_atomic` (the classical way, kept for comparison), `bench` (measures and tunes
them). Attention: `store_kv`, `decode` (the launch), `attend` (its inner loops), `decode_plan` (how
many programs share a context).
"""

from __future__ import annotations

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None

__all__ = ["HAS_TRITON"]
