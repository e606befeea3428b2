"""Build what `LLM` runs on: find the checkpoint, load it, warm up."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from minilora.config.engine import EngineConfig
from minilora.config.errors import CheckpointError, ConfigError, is_full_memory
from minilora.config.json_file import read_json_object
from minilora.config.model import ModelConfig
from minilora.config.sampling import SamplingParams
from minilora.engine.kv_pool import (
    fitted_context,
    longest_context,
    make_kv_cache,
    most_blocks,
    num_blocks_for,
)
from minilora.engine.make_runner import graph_kind, make_runner, warn_of_eager_decode
from minilora.lora.adapter import load_adapter
from minilora.lora.layers import LayerOptions
from minilora.lora.slots import AdapterSlots
from minilora.model.kv_cache import KVCache
from minilora.model.llama import Llama
from minilora.model.weights import check_weights, fill_weights, load_weights
from minilora.ops.triton import HAS_TRITON
from minilora.runner import ModelRunner
from minilora.warmup import MIB, CaptureReport, WarmUp

logger = logging.getLogger("minilora")
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class System:
    """The running parts behind one `LLM`.

    Attributes:
        capture_report: what the graphs took.
    """

    folder: Path
    model_config: ModelConfig
    max_model_len: int
    kv_cache: KVCache
    runner: ModelRunner
    slots: AdapterSlots | None
    capture_report: CaptureReport


@torch.inference_mode(False)  # else no step outside of it could write these tensors
def build(config: EngineConfig) -> System:
    """Load the model and make its KV pool, step buffers, runner and adapter slots.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: an option does not go with the model, the machine or another option.
    """
    folder = find_checkpoint(config.model)
    model_config = ModelConfig.from_folder(folder)
    device = _device(config.device)
    graph_kind(config, device)  # refused before any memory is taken
    dtype = _dtype(config.dtype, model_config.dtype, device)
    if config.load_format == "auto":
        skeleton = Llama(model_config, 1, LayerOptions(dtype, torch.device("meta")))
        check_weights(skeleton, folder)  # before any memory is taken
    most = most_blocks(config, model_config, dtype, device)
    longest = min(longest_context(config, model_config), most * config.block_size)
    max_loras = config.max_loras if config.enable_lora else 0
    options = LayerOptions(dtype, device, max_loras, config.max_lora_rank if max_loras else 0)
    model = _model(config, model_config, longest, options)
    if config.load_format == "dummy":
        fill_weights(model, config.seed)
    else:
        load_weights(model, folder, progress=sys.stderr.isatty())
    num_blocks = num_blocks_for(config, model, most, longest, options)
    max_model_len = fitted_context(config, longest, num_blocks)
    kv_cache = make_kv_cache(config, model_config, num_blocks, options)
    kv_cache.bind(model)
    runner = make_runner(config, model, kv_cache, max_model_len, options)
    warn_of_eager_decode(config, runner.dispatcher)
    report = _warm_up(config, runner, max_model_len)
    slots = _slots(config, model, options)
    return System(folder, model_config, max_model_len, kv_cache, runner, slots, report)


def _model(
    config: EngineConfig, model_config: ModelConfig, longest: int, options: LayerOptions
) -> Llama:
    """Return the model, its weights not yet read.

    Raises:
        ConfigError: there is no memory for weights and adapter slots.
    """
    try:
        return Llama(model_config, longest, options, compiled=compiled(config, options.device))
    except (MemoryError, RuntimeError) as error:
        if not is_full_memory(error):
            raise
        raise ConfigError(
            f"LLM: there is no memory for the weights and max_loras={options.max_loras} adapter "
            f"slots of max_lora_rank={options.max_lora_rank}; lower these two, or take a smaller "
            "dtype"
        ) from error


def find_checkpoint(model: str) -> Path:
    """Return the folder of a checkpoint; a hub id is fetched if `huggingface_hub` is there."""
    if Path(model).is_dir():
        return Path(model)
    looks_like_id = model.count("/") <= 1 and not model.startswith((".", "/", "~"))
    if not looks_like_id:
        raise CheckpointError(f"model={model!r} is no folder; give the folder of a checkpoint")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"model={model!r} is no folder; to fetch it from the hub, pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=_CHECKPOINT_FILES))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"model={model!r} is no folder and could not be fetched from the hub: {reason}"
        ) from error


def default_params(folder: Path) -> SamplingParams:
    """Return the sampling defaults of a checkpoint's generation_config.json, if it has one."""
    file = folder / "generation_config.json"
    try:
        return SamplingParams.from_generation_config(
            read_json_object(file) if file.exists() else {}
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"LLM: device={name!r} must be 'auto', 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"LLM: device={name!r} must be 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"LLM: device={name!r}, but torch finds no CUDA device; use 'cpu'")
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" is the same
    if device.index is not None and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"LLM: device={name!r} is not torch's current device; choose it with "
            "CUDA_VISIBLE_DEVICES or torch.cuda.set_device, and use 'cuda'"
        )
    return device


def compiled(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the options ask for `torch.compile` on this device."""
    if config.compile == "auto":
        return device.type == "cuda" and HAS_TRITON and config.graph != "recorded"
    return config.compile == "inductor"


def _dtype(asked: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        asked = of_checkpoint if device.type == "cuda" else "float32"
    dtype = getattr(torch, asked)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _warm_up(config: EngineConfig, runner: ModelRunner, max_model_len: int) -> CaptureReport:
    limit = None if config.max_graph_memory is None else config.max_graph_memory * MIB
    warm_up = WarmUp(runner, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)
    report = warm_up.run(limit, progress=sys.stderr.isatty())
    if report.graphs:
        logger.info("captured %s", report)
    return report


def _slots(config: EngineConfig, model: Llama, options: LayerOptions) -> AdapterSlots | None:
    if not config.enable_lora:
        return None
    base = {"model.embed_tokens": model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    read = partial(
        load_adapter,
        config=model.config,
        max_lora_rank=config.max_lora_rank,
        dtype=options.dtype,
        base_weight=base.__getitem__,
        adapter_root=config.adapter_root,
    )
    return AdapterSlots(
        model.lora_layers(),
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras,
        read=read,
    )
