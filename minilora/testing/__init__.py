"""The public harness: made checkpoints and adapters, and an oracle.

The oracle shares nothing with the system but the reading of config.json and of adapter folders.
"""

from minilora.testing.oracle import Oracle
from minilora.testing.signature import make_signature_adapter, make_signature_llama
from minilora.testing.tiny import TinyLlama, make_tiny_llama
from minilora.testing.tiny_adapter import TinyAdapter, make_tiny_adapter

__all__ = [
    "Oracle",
    "TinyAdapter",
    "TinyLlama",
    "make_signature_adapter",
    "make_signature_llama",
    "make_tiny_adapter",
    "make_tiny_llama",
]
