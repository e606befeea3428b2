"""The parts of a Llama between the projections: RMSNorm, rotary embedding, attention, MLP.

Legend: T rows, H hidden, Hq query heads, Hkv key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from minilora.batch import StepContext
from minilora.config.model import ModelConfig
from minilora.config.rope import RopeConfig
from minilora.graphs.piecewise import outside_graph
from minilora.lora.layers import LayerOptions, LoraLinear, LoraMergedLinear
from minilora.model.fused import Fused
from minilora.ops.attention import decode_attention, prefill_attention, store_kv


class RMSNorm(nn.Module):
    """Root mean square norm behind a residual."""

    def __init__(self, name: str, width: int, eps: float, fused: Fused, o: LayerOptions) -> None:
        super().__init__()
        self.name, self.eps, self._fused = name, eps, fused
        self.weight = o.empty(width)

    def forward(
        self, delta: torch.Tensor | None, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's output to the residual stream and normalise that.

        Args:
            delta: ``[T, H]``, or None in front of the first layer.
            x: ``[T, H]``, the residual stream.

        Returns:
            The normalised rows and the new residual stream.
        """
        if delta is None:
            return self._fused.rms_norm(x, self.weight, self.eps), x
        normed, x = self._fused.add_rms_norm(x, delta, self.weight, self.eps)
        return normed, x

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the one tensor of a checkpoint."""
        yield f"{self.name}.weight", self.weight


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (arXiv:2104.09864): a table of cosines and sines."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, length: int, fused: Fused, device: torch.device
    ) -> None:
        super().__init__()
        self._fused = fused
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(rope, head_dim))  # [length, D/2]
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def forward(
        self, qkv: torch.Tensor, positions: torch.Tensor, heads: int, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys of ``[T, Hq + 2 Hkv, D]``, rotated."""
        q, k = self._fused.rotate(qkv, positions, self.cos, self.sin, heads, kv_heads)
        return q, k


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of coordinates, float32 ``[D/2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # llama3: a wavelength longer than the old context / low is stretched by the factor, one
    # shorter than the old context / high is kept, and those between are blended.
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


class Attention(nn.Module):
    """Grouped-query attention over a paged KV cache."""

    def __init__(self, prefix: str, config: ModelConfig, rope: RotaryEmbedding, o: LayerOptions):
        super().__init__()
        heads, kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.widths = [heads * width, kv_heads * width, kv_heads * width]
        self.head_dim, self.scale, self.rope = width, width**-0.5, rope
        names = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        bias = config.attention_bias
        self.qkv_proj = LoraMergedLinear(names, config.hidden_size, self.widths, bias, o)
        self.o_proj = LoraLinear(f"{prefix}.o_proj", self.widths[0], config.hidden_size, bias, o)
        self.k_cache = self.v_cache = torch.empty(0)  # given by `KVCache.bind`

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """``[T, H] -> [T, H]``; writes the new keys and values first."""
        qkv = self.qkv_proj(x, step).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        heads, kv_heads, _ = (width // self.head_dim for width in self.widths)
        q, k = self.rope(qkv, step.positions, heads, kv_heads)
        v = qkv[:, heads + kv_heads :]
        store_kv(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        attended = outside_graph(self._attend, q, step)  # [T, Hq, D]
        return self.o_proj(attended.flatten(1), step)  # type: ignore[no-any-return]

    def _attend(self, q: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Attend with the decode rows ``q[:num_decodes]``, then with the prefill rows."""
        n, caches, parts = step.num_decodes, (self.k_cache, self.v_cache), []
        q = q[: step.num_attention_rows]
        if n:
            tables, lens = step.block_tables[:n], step.context_lens[:n]
            longest = step.max_context_len
            parts.append(decode_attention(q[:n], *caches, tables, lens, longest, self.scale))
        if step.prefill_query_lens:
            lengths = step.prefill_query_lens, step.prefill_context_lens
            tables = step.block_tables[n:]
            parts.append(prefill_attention(q[n:], *caches, tables, *lengths, self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, prefix: str, config: ModelConfig, fused: Fused, o: LayerOptions) -> None:
        super().__init__()
        self._fused = fused
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up_proj = LoraMergedLinear(names, hidden, [inner, inner], bias, o)
        self.down_proj = LoraLinear(f"{prefix}.down_proj", inner, hidden, bias, o)

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        inner = self._fused.silu_and_mul(self.gate_up_proj(x, step))
        return self.down_proj(inner, step)  # type: ignore[no-any-return]
