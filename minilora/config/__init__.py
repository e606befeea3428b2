"""What the user chose: frozen dataclasses that refuse unknown keys and bad ranges by name."""

from minilora.config.engine import EngineConfig
from minilora.config.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    MiniloraError,
    RequestError,
    UnknownOptionError,
)
from minilora.config.lora import LoRARequest
from minilora.config.model import ModelConfig
from minilora.config.rope import RopeConfig
from minilora.config.sampling import SamplingParams

__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "LoRARequest",
    "MiniloraError",
    "ModelConfig",
    "RequestError",
    "RopeConfig",
    "SamplingParams",
    "UnknownOptionError",
]
