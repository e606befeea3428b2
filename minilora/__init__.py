"""minilora: multi-LoRA Llama inference with CUDA graphs, small enough to read in an evening.

Importing the package is cheap: what needs torch is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minilora.config import (
    AdapterError,
    CheckpointError,
    ConfigError,
    LoRARequest,
    MiniloraError,
    RequestError,
    SamplingParams,
)

if TYPE_CHECKING:
    from minilora.engine.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "LoRARequest",
    "MiniloraError",
    "RequestError",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minilora.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'minilora' has no attribute {name!r}")
