"""`EngineConfig`: what the user of `LLM` chose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from minilora.config.capture_sizes import check_capture_sizes
from minilora.config.checks import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_path,
    strict_keywords,
)
from minilora.config.errors import ConfigError

GRAPHS = ("auto", "cuda", "recorded", "none")
GRAPH_MODES = ("full_and_piecewise", "full", "piecewise", "none")
DTYPES = ("auto", "float32", "float16", "bfloat16")
MAX_LORA_RANK = 256  # the largest rank that the LoRA ops are built and tested for

_WHERE = "LLM: "
_RANGES = {
    "max_loras": (1, 256),
    "max_lora_rank": (1, MAX_LORA_RANK),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 1 << 20),
    "block_size": (1, 1024),
    "seed": (0, 2**63 - 1),
}
_OPTIONAL_RANGES = {
    "max_cpu_loras": (1, 1 << 20),
    "max_model_len": (1, 1 << 24),
    "num_kv_blocks": (2, 1 << 30),
    "max_graph_memory": (0, 1 << 30),
}
_FLAGS = ("enable_lora", "specialize_lora", "specialize_active_lora", "async_scheduling")


@functools.partial(strict_keywords, shown_as="LLM")
@dataclass(frozen=True)
class EngineConfig:
    """The keywords of `LLM` (names as in vLLM where it has them).

    Attributes:
        model: folder of a Hugging Face checkpoint, or a hub id.
        enable_lora: build the model with adapter slots.
        max_loras: adapters that can be active in one step, i.e. slots on the device.
        max_lora_rank: the largest rank a slot can hold (1 to 256).
        max_cpu_loras: adapters kept in host memory; None means no limit. The least recently
            used idle one is dropped and read again when it is needed.
        specialize_lora: a step without any adapter runs no LoRA op (vLLM #25914).
        specialize_active_lora: a step's LoRA grid has the size of its own number of adapters,
            not of `max_loras` (vLLM #32005).
        graph: "cuda" for CUDA graphs, "recorded" for a recorder that replays on any device and
            finds what CUDA graphs would get wrong, "none" for neither; "auto" is "cuda" on CUDA
            and "none" elsewhere.
        graph_mode: "full" freezes steps with one row a request up to their logits; "piecewise"
            freezes any step but for attention; "full_and_piecewise" takes the first where it
            can; "none" freezes nothing.
        capture_sizes: numbers of rows to capture graphs for, ascending. None takes 1, 2, 4, then
            steps of 8 to 256, then of 16, up to `max_num_seqs` rows (FULL) and at most 512
            (PIECEWISE).
        compile: "inductor" fuses norms, rotary embedding, residuals and activations with
            `torch.compile`, "none" runs them one by one; "auto" is "inductor" on CUDA (unless
            graphs are recorded, which needs plain calls) and "none" elsewhere.
        max_graph_memory: MiB that all graphs may take; the least useful ones are left out, and
            their steps take larger ones or run without. None means no bound.
        load_format: "auto" reads the checkpoint's safetensors; "dummy" makes random weights and
            needs no more than config.json, for benchmarks (vLLM's option).
        dtype: of weights, activations and KV cache: "float32", "float16", "bfloat16", or "auto",
            the checkpoint's own on CUDA and float32 on a CPU.
        device: "cpu", "cuda", or "auto": CUDA where there is one.
        max_num_seqs: the most requests in one step.
        max_num_batched_tokens: the most tokens in one step; longer prompts run in chunks.
        max_model_len: the most tokens of prompt and answer together; None takes the
            checkpoint's, bounded by what the KV pool holds.
        block_size: tokens in one KV block.
        num_kv_blocks: size of the KV pool; None sizes it from memory. One block more is made
            for padding rows.
        async_scheduling: launch the next decode step before the tokens of the last one are known
            on the host, where nothing depends on them: greedy decoding on CUDA (vLLM's option).
        gpu_memory_utilization: share of the GPU's memory that weights, slots, activations and
            KV pool may fill together.
        adapter_root: if set, adapters are read from below this folder only.
        seed: for requests that bring no seed of their own.

    Raises:
        ConfigError: a value out of range, by name; an unknown keyword with the nearest one.
    """

    model: str
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    specialize_lora: bool = True
    specialize_active_lora: bool = True
    graph: str = "auto"
    graph_mode: str = "full_and_piecewise"
    capture_sizes: Sequence[int] | None = None
    compile: str = "auto"
    max_graph_memory: int | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    async_scheduling: bool = False
    gpu_memory_utilization: float = 0.9
    adapter_root: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(f"{_WHERE}model={self.model!r} must be a folder or a hub id")
        for name, (low, high) in {**_RANGES, **_OPTIONAL_RANGES}.items():
            if getattr(self, name) is not None or name in _RANGES:
                number = check_int(_WHERE, name, getattr(self, name), low, high)
                object.__setattr__(self, name, number)
        for name in _FLAGS:
            check_bool(_WHERE, name, getattr(self, name))
        check_choice(_WHERE, "dtype", self.dtype, DTYPES)
        check_choice(_WHERE, "load_format", self.load_format, ("auto", "dummy"))
        check_choice(_WHERE, "graph", self.graph, GRAPHS)
        check_choice(_WHERE, "graph_mode", self.graph_mode, GRAPH_MODES)
        check_choice(_WHERE, "compile", self.compile, ("auto", "inductor", "none"))
        check_number(_WHERE, "gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        if self.adapter_root is not None:
            object.__setattr__(
                self, "adapter_root", check_path(_WHERE, "adapter_root", self.adapter_root)
            )
        self._check_together()

    def _check_together(self) -> None:
        if self.capture_sizes is not None:
            sizes = check_capture_sizes(
                self.capture_sizes,
                self.graph_mode,
                self.max_num_seqs,
                self.max_num_batched_tokens,
                _WHERE,
            )
            object.__setattr__(self, "capture_sizes", sizes)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{_WHERE}max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every request can add one token a step"
            )
        if self.compile == "inductor" and self.graph == "recorded":
            raise ConfigError(
                f"{_WHERE}compile='inductor' does not go with graph='recorded': under a recorder "
                "compiled functions run uncompiled; use compile='none', or another graph"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"{_WHERE}max_cpu_loras={self.max_cpu_loras} must be at least "
                f"max_loras={self.max_loras}: every adapter in a slot is also kept on the CPU"
            )
