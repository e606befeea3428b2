"""`KVCache`: the pool of KV blocks, and how many fit."""

from __future__ import annotations

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
        self.tensor = torch.zeros(config.num_hidden_layers, 2, *shape, dtype=dtype, device=device)

    def bind(self, model: Llama) -> None:
        """Give each attention layer of the model its keys and values."""
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        for attention, (k_cache, v_cache) in zip(attentions, self.tensor, strict=True):
            attention.k_cache, attention.v_cache = k_cache, v_cache


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values together."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return block_size * per_token * dtype.itemsize
