"""The oracle: what a Llama with a LoRA adapter computes, written to be read and not to be fast.

It shares nothing with the system it judges but the reading of config.json and of adapter folders
(their scaling too, which tests compare with PEFT): no cache, no batching, no custom op, no graph.
The adapter is merged into the weights, ``W + s·B·A``, and every token runs the whole sequence
again.

Legend: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head width, I MLP width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from minilora.config.errors import CheckpointError, ConfigError, RequestError
from minilora.config.model import ModelConfig
from minilora.config.rope import RopeConfig
from minilora.lora.adapter import Adapter, load_adapter

Weights = Mapping[str, torch.Tensor]
_ANY_RANK = 1 << 16


class Oracle:
    """A Llama checkpoint in plain PyTorch (arXiv:2307.09288), with one LoRA adapter or none.

    Args:
        model_folder: a Hugging Face folder with safetensors.
        dtype: float64, or float32 to see what rounding alone can do.
        device: where to compute.

    Raises:
        CheckpointError, ConfigError: the folder is no Llama that minilora runs.
    """

    def __init__(
        self,
        model_folder: str | Path,
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"Oracle: dtype={dtype} must be torch.float64 or torch.float32")
        self.config = ModelConfig.from_folder(model_folder)
        self.dtype, self.device = dtype, torch.device(device)
        self._weights = _read_weights(Path(model_folder), self.config, dtype, self.device)

    @torch.no_grad()
    def logits(
        self, token_ids: Sequence[int], adapter: Adapter | str | Path | None = None
    ) -> torch.Tensor:
        """Return the logits after each token, ``[T, vocab]`` in the oracle's dtype.

        Args:
            token_ids: the sequence, at least one token.
            adapter: one that `load_adapter` returned, the folder of one, or None.

        Raises:
            RequestError: `token_ids` is empty or holds an id that is not in the vocabulary.
            AdapterError: the folder of the adapter does not fit the model.
        """
        return self._forward(token_ids, self._merge(adapter))

    @torch.no_grad()
    def greedy(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        adapter: Adapter | str | Path | None = None,
        eos: Iterable[int] = (),
    ) -> list[int]:
        """Return the most likely continuation, at most `max_tokens` tokens.

        The first token of `eos` ends it and is part of it. An exact tie goes to the lowest id.
        For the errors see `logits`.
        """
        weights, ends, answer = self._merge(adapter), set(eos), list[int]()
        while len(answer) < max_tokens and not ends.intersection(answer[-1:]):
            last = self._forward([*token_ids, *answer], weights)[-1]
            answer.append(int((last == last.max()).nonzero()[0]))
        return answer

    def _merge(self, adapter: Adapter | str | Path | None) -> Weights:
        """Return all weights, those that the adapter changes replaced by ``W + s·B·A``."""
        if adapter is None:
            return self._weights
        if not isinstance(adapter, Adapter):
            adapter = self._load(Path(adapter))
        merged = dict(self._weights)
        for name, lora in adapter.modules.items():
            a, b = (x.to(self.device, self.dtype) for x in (lora.a, lora.b))
            change = lora.scaling * (b @ a)  # [out, in]
            # A tied head has an entry of its own here, so an adapter on the embedding does not
            # reach it, and one on the head does not reach the embedding: as in PEFT.
            is_embedding = name == "model.embed_tokens"  # stored [vocab, H], which is [in, out]
            merged[f"{name}.weight"] = self._weights[f"{name}.weight"] + (
                change.T if is_embedding else change
            )
        return merged

    def _load(self, folder: Path) -> Adapter:
        return load_adapter(
            folder.name,
            folder,
            self.config,
            max_lora_rank=_ANY_RANK,
            base_weight=lambda name: self._weights[f"{name}.weight"],
        )

    def _forward(self, token_ids: Sequence[int], weights: Weights) -> torch.Tensor:
        """Return the logits ``[T, vocab]`` of a sequence."""
        config = self.config
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
            raise RequestError(
                f"Oracle: token_ids must be one or more ids from 0 to {config.vocab_size - 1}"
            )
        x = weights["model.embed_tokens.weight"][list(token_ids)]  # [T, H]
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, weights[f"{prefix}.input_layernorm.weight"])
            x = x + self._attention(normed, weights, f"{prefix}.self_attn")
            normed = self._norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
            x = x + self._mlp(normed, weights, f"{prefix}.mlp")
        x = self._norm(x, weights["model.norm.weight"])
        return x @ weights["lm_head.weight"].T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide each row by its root mean square (arXiv:1910.07467)."""
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def _attention(self, x: torch.Tensor, weights: Weights, prefix: str) -> torch.Tensor:
        """Causal attention with grouped query heads (arXiv:2305.13245), ``[T, H] -> [T, H]``."""
        config, length = self.config, len(x)

        def heads(name: str) -> torch.Tensor:  # [heads, T, D]
            out = _linear(x, weights, f"{prefix}.{name}", config.attention_bias)
            return out.view(length, -1, config.head_dim).transpose(0, 1)

        q, k = _rotate(heads("q_proj"), config), _rotate(heads("k_proj"), config)
        v = heads("v_proj")
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)  # [Hq, T, D]
        scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)  # [Hq, T, T]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)  # [T, Hq * D]
        return _linear(mixed, weights, f"{prefix}.o_proj", config.attention_bias)

    def _mlp(self, x: torch.Tensor, weights: Weights, prefix: str) -> torch.Tensor:
        """SwiGLU (arXiv:2002.05202), ``[T, H] -> [T, I] -> [T, H]``."""
        bias = self.config.mlp_bias
        gate = _linear(x, weights, f"{prefix}.gate_proj", bias)
        up = _linear(x, weights, f"{prefix}.up_proj", bias)
        return _linear(gate * gate.sigmoid() * up, weights, f"{prefix}.down_proj", bias)


def _linear(x: torch.Tensor, weights: Weights, name: str, bias: bool) -> torch.Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if bias else out


def _rotate(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Turn coordinates i and i + D/2 of ``[heads, T, D]`` by an angle that grows with position."""
    positions = torch.arange(x.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, _frequencies(config.rope, config.head_dim))  # [T, D/2]
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each of the D/2 pairs, float64."""
    return torch.tensor(
        [_scaled(rope.theta ** (-2 * i / head_dim), rope) for i in range(head_dim // 2)],
        dtype=torch.float64,
    )


def _scaled(frequency: float, rope: RopeConfig) -> float:
    """Apply the checkpoint's scaling to one frequency, which lets it serve longer contexts."""
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    # llama3: how often does this pair turn within the context that the model first learned?
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    if turns > rope.high_freq_factor:
        return frequency  # often: it tells neighbours apart, keep it
    if turns < rope.low_freq_factor:
        return frequency / rope.factor  # not once: stretch it over the longer context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return share * frequency + (1 - share) * frequency / rope.factor


def _read_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Read every tensor, from one file or from those that the index names."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if not (folder / "model.safetensors").exists() and index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(files):
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} is missing")
        weights |= {k: v.to(device, dtype) for k, v in load_file(folder / file).items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    missing = {f"{name}.weight" for name in config.lora_modules()} - weights.keys()
    if missing:
        raise CheckpointError(f"{folder} lacks the tensor {min(missing)!r}")
    return weights
