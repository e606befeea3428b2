"""The public harness: made checkpoints and adapters, an oracle, and checks of every path.

The oracle shares nothing with the system but the reading of config.json and of adapter folders.
"""

from minilora.testing.checker import StepChecker
from minilora.testing.faults import Fault, FaultFound, FaultKind
from minilora.testing.fuzz import fuzz
from minilora.testing.oracle import Oracle
from minilora.testing.parity import ParityReport, available_paths, run_parity
from minilora.testing.poison import poisoned
from minilora.testing.replay import check_replay
from minilora.testing.signature import make_signature_adapter, make_signature_llama
from minilora.testing.tiny import TinyLlama, make_tiny_llama
from minilora.testing.tiny_adapter import TinyAdapter, make_tiny_adapter
from minilora.testing.workloads import WORKLOADS, workload

__all__ = [
    "WORKLOADS",
    "Fault",
    "FaultFound",
    "FaultKind",
    "Oracle",
    "ParityReport",
    "StepChecker",
    "TinyAdapter",
    "TinyLlama",
    "available_paths",
    "check_replay",
    "fuzz",
    "make_signature_adapter",
    "make_signature_llama",
    "make_tiny_adapter",
    "make_tiny_llama",
    "poisoned",
    "run_parity",
    "workload",
]
