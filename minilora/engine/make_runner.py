"""Make a `ModelRunner` from the options: its buffers, its dispatcher, its graph backend."""

from __future__ import annotations

import logging

import torch

from minilora.batch import GraphMode
from minilora.config.engine import EngineConfig
from minilora.config.errors import ConfigError
from minilora.graphs.base import GraphBackend, Static
from minilora.graphs.cuda import CudaBackend
from minilora.graphs.dispatcher import GraphDispatcher
from minilora.graphs.recorded import RecordedBackend
from minilora.lora.layers import LayerOptions
from minilora.model.kv_cache import KVCache
from minilora.model.llama import Llama
from minilora.ops.triton import HAS_TRITON
from minilora.runner import ModelRunner
from minilora.step_buffers import StepBuffers

logger = logging.getLogger("minilora")


def make_runner(
    config: EngineConfig,
    model: Llama,
    kv_cache: KVCache,
    max_model_len: int,
    options: LayerOptions,
) -> ModelRunner:
    """Return a runner for the model; nothing is captured yet."""
    buffers = StepBuffers(
        max_num_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-max_model_len // config.block_size),
        block_size=config.block_size,
        max_loras=options.max_loras,
        device=options.device,
    )

    def static() -> dict[str, torch.Tensor]:
        tensors = {"step buffers": buffers.packed.tensor, "KV cache": kv_cache.tensor}
        return {**tensors, **dict(model.static_tensors())}

    backend = _backend(graph_kind(config, options.device), options.device, static)
    most = config.max_num_seqs * max_model_len  # no step has more tokens
    dispatcher = GraphDispatcher(
        graph_mode=config.graph_mode if backend else "none",
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, most)
        if config.capture_sizes is None
        else config.max_num_batched_tokens,
        max_loras=options.max_loras,
        capture_sizes=config.capture_sizes,
        specialize_lora=config.specialize_lora,
        specialize_active_lora=config.specialize_active_lora,
    )
    dispatcher.drop([key for key in dispatcher.keys if key.descriptor.num_tokens > most])
    return ModelRunner(model, buffers, dispatcher, backend)


def warn_of_eager_decode(config: EngineConfig, dispatcher: GraphDispatcher) -> None:
    """Say so if the full batch decodes without a graph: it is only slow (vllm-ascend 16049)."""
    full = dispatcher.dispatch(config.max_num_seqs, 0, True).mode
    if config.capture_sizes is not None and dispatcher.keys and full is GraphMode.NONE:
        logger.warning(
            "capture_sizes=%s: decode steps of max_num_seqs=%d rows run without a graph; add %d",
            *(list(config.capture_sizes), config.max_num_seqs, config.max_num_seqs),
        )
    if config.capture_sizes is not None and not dispatcher.keys:
        why = "no step can have so many rows"
        if dispatcher.graph_mode == "none":
            why = f"graph={config.graph!r} with graph_mode={config.graph_mode!r} is no graph here"
        logger.warning(
            "capture_sizes=%s: %s, so none runs from a graph", list(config.capture_sizes), why
        )


def graph_kind(config: EngineConfig, device: torch.device) -> str:
    """Return which graphs the options ask for on this device: "cuda", "recorded" or "none".

    Raises:
        ConfigError: CUDA graphs on another device, or with adapters where Triton is missing.
    """
    if config.graph == "cuda" and device.type != "cuda":
        raise ConfigError(
            f"LLM: graph='cuda' needs a CUDA device, and the device is {str(device)!r}; "
            "graph='recorded' replays graphs on any device, graph='none' runs without"
        )
    kind = config.graph
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "none"
    if config.graph_mode == "none" or kind == "none":
        return "none"
    if kind == "cuda" and config.enable_lora and not HAS_TRITON:
        raise ConfigError(
            "LLM: enable_lora=True in CUDA graphs needs the LoRA kernels, and Triton is not "
            "installed; install it, or use graph='none'"
        )
    return kind


def _backend(kind: str, device: torch.device, static: Static) -> GraphBackend | None:
    if kind == "none":
        return None
    return CudaBackend(static, device) if kind == "cuda" else RecordedBackend(static)
