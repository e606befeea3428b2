"""What the harness finds, by name."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """The faults of graphs with LoRA; the value is how a report names one."""

    WRONG_GRAPH = "a graph was chosen that does not fit the step"
    UNREACHABLE_KEY = "a graph was captured that no step can use"
    NO_LORA_LAUNCHES = "a LoRA graph was captured without LoRA launches"
    NEEDLESS_LORA = "a graph without LoRA launches LoRA kernels"
    STALE_STEP = "the step's buffers hold values that do not belong to it"
    WRONG_ROUTING = "the routing tables do not describe the step"
    INPUT_WRITTEN = "an input buffer is written in place"
    WRONG_SLOT = "a slot does not hold the adapter of a running request"
    ADAPTER_DROPPED = "rows lost their adapter in the replay"
    NOT_RESET = "a buffer is not reset inside the graph"
    UNWRITTEN_MEMORY = "the graph reads memory that it did not write"
    FROZEN_VALUE = "a value of the capture was frozen"
    PADDING_LEAKS = "what is in padding reaches real rows"
    WRONG_KV = "the replay leaves other KV entries than eager execution"
    WRONG_ROWS = "execute does not return the rows that sample"
    SHARED_BLOCK = "two requests own one KV block"
    NOT_FINITE = "logits are not finite"
    STEP_FAILED = "a step failed"
    NOTHING_REPLAYED = "no step ran from a graph"
    FOREIGN_KV = "KV entries were written that are not the step's"
    STALE_OUTPUT = "an output was read after the next replay"
    MOVED = "a fixed tensor has moved"
    NOT_CAPTURABLE = "the function cannot be captured"
    WRONG_LOGITS = "logits differ from the oracle"


@dataclass(frozen=True)
class Fault:
    """One finding.

    Attributes:
        kind: its name.
        detail: where, and with which values.
    """

    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        """Return the name and the detail as one sentence."""
        return f"{self.kind.value}: {self.detail}"


class FaultFound(AssertionError):  # noqa: N818 - a finding of a test, as AssertionError is
    """Raised by checks that end at the first finding.

    Attributes:
        faults: what was found, at least one.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))
