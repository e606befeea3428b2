"""How many KV blocks there are: as asked for, or as memory allows."""

from __future__ import annotations

import psutil
import torch

from minilora.batch import NO_LORA, PADDING_BLOCK, Batch, BatchRow
from minilora.config.engine import EngineConfig
from minilora.config.errors import ConfigError, is_full_memory
from minilora.config.model import ModelConfig
from minilora.config.sampling import SamplingParams
from minilora.engine.make_runner import make_runner
from minilora.engine.sampler import SamplingRow, draw, make_rng
from minilora.lora.layers import LayerOptions
from minilora.model.kv_cache import KVCache, bytes_per_block
from minilora.model.llama import Llama
from minilora.warmup import MIB, WarmUp

_ON_CUDA = (
    "lower max_loras, max_lora_rank or max_num_batched_tokens, or raise gpu_memory_utilization"
)
_ON_CPU = "free memory, or give num_kv_blocks"


def longest_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the context that the options and the checkpoint allow, whatever memory holds."""
    of_model = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > of_model:
        raise ConfigError(
            f"LLM: max_model_len={config.max_model_len} is more than the checkpoint's "
            f"max_position_embeddings={of_model}"
        )
    return config.max_model_len or of_model


def fitted_context(config: EngineConfig, longest: int, num_blocks: int) -> int:
    """Bound the context by what the KV pool holds; refuse it where the user asked for more."""
    held = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > held:
        raise ConfigError(
            f"LLM: max_model_len={config.max_model_len} does not fit the KV pool of "
            f"num_kv_blocks={num_blocks} x block_size={config.block_size} = {held} tokens; "
            "lower max_model_len or raise num_kv_blocks"
        )
    return min(longest, held)


def most_blocks(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many KV blocks there can be; on CUDA a bound, made exact by `num_blocks_for`."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type == "cuda":
        left, way_out = torch.cuda.get_device_properties(device).total_memory, _ON_CUDA
    else:
        left, way_out = psutil.virtual_memory().available // 4, _ON_CPU
    blocks_a_request = -(-longest_context(config, model_config) // config.block_size)
    useful = config.max_num_seqs * blocks_a_request  # no step can use more
    return min(_blocks_in(left, config, model_config, dtype, way_out), useful)


def num_blocks_for(
    config: EngineConfig, model: Llama, most: int, longest: int, options: LayerOptions
) -> int:
    """Return how many KV blocks to make: as asked for, or as memory allows."""
    if config.num_kv_blocks is not None or options.device.type != "cuda":
        return most
    left = _cuda_bytes_left(config, model, longest, options)
    return min(most, _blocks_in(left, config, model.config, options.dtype, _ON_CUDA))


def make_kv_cache(
    config: EngineConfig, model_config: ModelConfig, num_blocks: int, options: LayerOptions
) -> KVCache:
    """Return the KV pool.

    Raises:
        ConfigError: there is no memory for so many blocks; says how much they take.
    """
    size = num_blocks, config.block_size, options.dtype
    try:
        return KVCache(model_config, *size, options.device)
    except (MemoryError, RuntimeError) as error:
        if not is_full_memory(error):
            raise
        block_bytes = bytes_per_block(model_config, config.block_size, options.dtype)
        raise ConfigError(
            f"LLM: there is no memory for num_kv_blocks={num_blocks}, which take "
            f"{num_blocks * block_bytes / MIB:.0f} MiB; give fewer, or leave it to the engine"
        ) from error


def _blocks_in(
    left: int, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, way_out: str
) -> int:
    """Return how many KV blocks `left` bytes hold.

    Raises:
        ConfigError: fewer than two, with the bytes and the options that free some.
    """
    block_bytes = bytes_per_block(model_config, config.block_size, dtype)
    if left // block_bytes < 2:
        raise ConfigError(
            f"LLM: {max(left, 0)} bytes are left for the KV pool, and one block of "
            f"{config.block_size} tokens takes {block_bytes}; {way_out}"
        )
    return left // block_bytes


def _cuda_bytes_left(
    config: EngineConfig, model: Llama, longest: int, options: LayerOptions
) -> int:
    """Return what the KV pool may take: the allowed share less the peak of the largest step."""
    torch.cuda.reset_peak_memory_stats(options.device)
    graphs = _profile(config, model, longest, options)
    peak = torch.cuda.max_memory_allocated(options.device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(options.device).total_memory
    free, _ = torch.cuda.mem_get_info(options.device)
    allowed = int(total * config.gpu_memory_utilization)
    others = total - free - torch.cuda.memory_reserved(options.device)
    return allowed - peak - graphs - max(others, 0)


def _profile(config: EngineConfig, model: Llama, longest: int, options: LayerOptions) -> int:
    """Run the steps that take most, all in the padding block: the most tokens and requests, with
    all that sampling can do, and the last chunk of the longest prompt.

    Returns:
        The bytes that the graphs will take, estimated.
    """
    cache = KVCache(model.config, 0, config.block_size, options.dtype, options.device)
    cache.bind(model)
    runner = make_runner(config, model, cache, longest, options)
    requests, tokens = config.max_num_seqs, config.max_num_batched_tokens
    lengths = sorted((tokens + index) // requests for index in range(requests))
    rows = [_profile_row(config, min(n, longest), 0) for n in lengths]
    draw(runner.execute(Batch(tuple(rows))), [_SAMPLING] * len(rows))
    chunk = min(tokens, longest)
    runner.execute(Batch((_profile_row(config, chunk, longest - chunk),)))
    keys = runner.dispatcher.keys
    if runner.backend is None or not keys:
        return 0
    costs = WarmUp(runner, max_num_seqs=requests, max_model_len=longest).measure_costs()
    most = config.max_graph_memory
    return min(costs.of(keys), costs.of(keys) if most is None else most * MIB)


# A row that takes every step of the sampler, each with copies of the logits.
_SAMPLING = SamplingRow(
    SamplingParams(temperature=1.0, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
    *([0], [0], make_rng(0)),
    banned_token_ids=[0],
)


def _profile_row(config: EngineConfig, length: int, start: int) -> BatchRow:
    blocks = [PADDING_BLOCK] * -(-(start + length) // config.block_size)
    return BatchRow([0] * length, start, blocks, NO_LORA, samples=True)
