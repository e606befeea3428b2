"""Build what `LLM` runs on: find the checkpoint, load it, and size the KV pool."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from minilora.batch import Batch, BatchRow, StepBuffers
from minilora.config.engine import EngineConfig
from minilora.config.errors import CheckpointError, ConfigError
from minilora.config.model import ModelConfig, read_json_object
from minilora.config.sampling import SamplingParams
from minilora.lora.adapter import load_adapter
from minilora.lora.layers import LayerOptions
from minilora.lora.slots import AdapterSlots
from minilora.model.kv_cache import KVCache, bytes_per_block
from minilora.model.llama import Llama
from minilora.model.weights import check_weights, load_weights
from minilora.runner import ModelRunner

_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class System:
    """The running parts behind one `LLM`."""

    folder: Path
    model_config: ModelConfig
    max_model_len: int
    kv_cache: KVCache
    runner: ModelRunner
    slots: AdapterSlots | None


def build(config: EngineConfig) -> System:
    """Load the model and make its KV pool, step buffers, runner and adapter slots.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: an option does not go with the model, the machine or another option.
    """
    folder = find_checkpoint(config.model)
    model_config = ModelConfig.from_folder(folder)
    device = _device(config.device)
    dtype = _dtype(config.dtype, model_config.dtype, device)
    skeleton = Llama(model_config, 1, LayerOptions(dtype, torch.device("meta")))
    check_weights(skeleton, folder)  # before any memory is taken
    most = _most_blocks(config, model_config, dtype, device)
    longest = min(_longest(config, model_config), most * config.block_size)
    max_loras = config.max_loras if config.enable_lora else 0
    options = LayerOptions(dtype, device, max_loras, config.max_lora_rank if max_loras else 0)
    model = Llama(model_config, longest, options)
    load_weights(model, folder, progress=sys.stderr.isatty())
    num_blocks = _num_blocks(config, model, most, options)
    max_model_len = _fit(config, longest, num_blocks)
    kv_cache = KVCache(model_config, num_blocks, config.block_size, dtype, device)
    kv_cache.bind(model)
    runner = _runner(config, model, max_model_len, options)
    return System(
        folder, model_config, max_model_len, kv_cache, runner, _slots(config, model, options)
    )


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
    return device


def _dtype(asked: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        asked = of_checkpoint if device.type == "cuda" else "float32"
    dtype = getattr(torch, asked)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _longest(config: EngineConfig, model_config: ModelConfig) -> int:
    of_model = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > of_model:
        raise ConfigError(
            f"LLM: max_model_len={config.max_model_len} is more than the checkpoint's "
            f"max_position_embeddings={of_model}"
        )
    return config.max_model_len or of_model


def _fit(config: EngineConfig, longest: int, num_blocks: int) -> int:
    """Bound the context by what the KV pool holds; refuse it where the user asked for more."""
    held = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > held:
        raise ConfigError(
            f"LLM: max_model_len={config.max_model_len} does not fit the KV pool of "
            f"num_kv_blocks={num_blocks} x block_size={config.block_size} = {held} tokens; "
            "lower max_model_len or raise num_kv_blocks"
        )
    return min(longest, held)


def _most_blocks(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many KV blocks there can be; on CUDA a bound, made exact by `_num_blocks`."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type == "cuda":
        left = torch.cuda.get_device_properties(device).total_memory
    else:
        left = psutil.virtual_memory().available // 4
    blocks_a_request = -(-_longest(config, model_config) // config.block_size)
    useful = config.max_num_seqs * blocks_a_request  # no step can use more
    return min(_blocks_in(left, config, model_config, dtype), useful)


def _num_blocks(config: EngineConfig, model: Llama, most: int, options: LayerOptions) -> int:
    """Return how many KV blocks to make: as asked for, or as memory allows."""
    if config.num_kv_blocks is not None or options.device.type != "cuda":
        return most
    left = _cuda_bytes_left(config, model, options)
    return min(most, _blocks_in(left, config, model.config, options.dtype))


def _blocks_in(
    left: int, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
) -> int:
    """Return how many KV blocks `left` bytes hold.

    Raises:
        ConfigError: fewer than two, with the bytes and the options that free some.
    """
    block_bytes = bytes_per_block(model_config, config.block_size, dtype)
    if left // block_bytes < 2:
        raise ConfigError(
            f"LLM: {max(left, 0)} bytes are left for the KV pool, and one block of "
            f"{config.block_size} tokens takes {block_bytes}; lower max_loras, max_lora_rank or "
            "max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return left // block_bytes


def _cuda_bytes_left(config: EngineConfig, model: Llama, options: LayerOptions) -> int:
    """Return what the KV pool may take: the allowed share less the peak of the largest step."""
    torch.cuda.reset_peak_memory_stats(options.device)
    _profile(config, model, options)
    peak = torch.cuda.max_memory_allocated(options.device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(options.device).total_memory
    free, _ = torch.cuda.mem_get_info(options.device)
    allowed = int(total * config.gpu_memory_utilization)
    others = total - free - torch.cuda.memory_reserved(options.device)
    return allowed - peak - max(others, 0)


def _profile(config: EngineConfig, model: Llama, options: LayerOptions) -> None:
    """Run one step of the most tokens and requests, all in the padding block."""
    requests = config.max_num_seqs
    lengths = [config.max_num_batched_tokens // requests] * requests
    lengths[-1] += config.max_num_batched_tokens - sum(lengths)
    longest = max(lengths)
    blocks = [0] * -(-longest // config.block_size)
    cache = KVCache(model.config, 0, config.block_size, options.dtype, options.device)
    cache.bind(model)
    rows = [BatchRow([0] * n, 0, blocks, -1, samples=True) for n in sorted(lengths)]
    _runner(config, model, max(longest, config.block_size), options).execute(Batch(tuple(rows)))


def _runner(
    config: EngineConfig, model: Llama, max_model_len: int, options: LayerOptions
) -> ModelRunner:
    buffers = StepBuffers(
        max_num_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-max_model_len // config.block_size),
        block_size=config.block_size,
        max_loras=options.max_loras,
        device=options.device,
    )
    return ModelRunner(
        model,
        buffers,
        max_loras=options.max_loras,
        specialize_lora=config.specialize_lora,
        specialize_active_lora=config.specialize_active_lora,
    )


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
