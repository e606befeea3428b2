"""`KVCache`: the pool of KV blocks, and the bytes of one."""

from __future__ import annotations

import math

import numpy as np
import torch

from minilora.config.model import ModelConfig
from minilora.model.layers import Attention
from minilora.model.llama import Llama


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    Block 0 belongs to nobody: padding rows write there. Requests use blocks 1 to `num_blocks`.

    Attributes:
        tensor: ``[layers, 2, num_blocks + 1, block_size, Hkv, D]``.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks + 1, block_size, config.num_key_value_heads, config.head_dim)
        self.tensor = _zeros((config.num_hidden_layers, 2, *shape), dtype, device)

    def bind(self, model: Llama) -> None:
        """Give each attention layer of the model its keys and values."""
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        for attention, (k_cache, v_cache) in zip(attentions, self.tensor, strict=True):
            attention.k_cache, attention.v_cache = k_cache, v_cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, memory is taken only where something is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages; torch writes its zeros, and so takes all of them.
    try:
        pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    except ValueError as error:  # more than any address
        raise MemoryError(str(error)) from error
    return torch.from_numpy(pages).view(dtype).view(shape)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values together."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return block_size * per_token * dtype.itemsize
