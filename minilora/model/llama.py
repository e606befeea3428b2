"""`Llama`: the decoder, from token ids to hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minilora.batch import GraphMode, StepContext
from minilora.config.model import ModelConfig
from minilora.lora.layers import (
    LayerOptions,
    LoraEmbedding,
    LoraLayer,
    LoraLmHead,
    LoraMergedLinear,
)
from minilora.model.fused import Fused
from minilora.model.layers import MLP, Attention, RMSNorm, RotaryEmbedding


class LlamaLayer(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        rope: RotaryEmbedding,
        fused: Fused,
        o: LayerOptions,
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", hidden, eps, fused, o)
        self.attention = Attention(f"{prefix}.self_attn", config, rope, o)
        self.post_norm = RMSNorm(f"{prefix}.post_attention_layernorm", hidden, eps, fused, o)
        self.mlp = MLP(f"{prefix}.mlp", config, fused, o)

    def forward(
        self, delta: torch.Tensor | None, x: torch.Tensor, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the output of the layer before, not added yet, and the residual stream ``[T, H]``.

        Returns:
            The same of this layer: the next norm adds it.
        """
        normed, x = self.input_norm(delta, x)
        normed, x = self.post_norm(self.attention(normed, step), x)
        return self.mlp(normed, step), x


class Llama(nn.Module):
    """A Llama (arXiv:2307.09288, 2407.21783) whose projections carry adapter slots.

    Weights are uninitialised until `minilora.model.weights.load_weights` fills them.

    Args:
        config: the model's sizes and switches.
        max_model_len: positions that the rotary table covers.
        options: dtype, device and adapter slots of every layer.
        compiled: fuse what lies between the ops with `torch.compile`, see `Fused`.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        options: LayerOptions,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compiled, fused = config, compiled, Fused(compiled)
        rope = RotaryEmbedding(config.rope, config.head_dim, max_model_len, fused, options.device)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = LoraEmbedding("model.embed_tokens", vocab, hidden, options)
        self.layers = nn.ModuleList(
            LlamaLayer(index, config, rope, fused, options)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm("model.norm", hidden, config.rms_norm_eps, fused, options)
        tied = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = LoraLmHead("lm_head", hidden, vocab, options, tied)

    def forward(self, step: StepContext, depth: int | None = None) -> torch.Tensor:
        """Return the hidden states ``[T, H]`` of a step, after the last norm.

        Args:
            step: the step to compute.
            depth: run only the first layers; enough for warming up, as all are of one shape.
        """
        delta, x = None, self.embed_tokens(step)
        for layer in self.layers[:depth]:
            delta, x = layer(delta, x, step)
        normed, _ = self.norm(delta, x)
        return normed  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return float32 logits: ``[T, vocab]`` in a FULL step, else ``[N, vocab]`` of the N rows
        that sample.
        """
        if step.mode is GraphMode.FULL:  # how many rows sample is not the descriptor's to say
            return self.lm_head(hidden, step.meta, step.num_active_loras)  # type: ignore[no-any-return]
        sampled = hidden[step.sample_indices]
        return self.lm_head(sampled, step.sample_meta, step.num_active_loras)  # type: ignore[no-any-return]

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in a checkpoint, the weight or the part of one that it fills)."""
        for module in self.modules():
            if isinstance(module, (LoraMergedLinear, LoraEmbedding, LoraLmHead, RMSNorm)):
                yield from module.checkpoint_tensors()

    def static_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor that a forward reads at a fixed address, by a name of its own."""
        for path, module in self.named_modules():
            if isinstance(module, LoraLayer):
                yield from ((f"{path}.{name}", tensor) for name, tensor in module.slot_tensors())
            if isinstance(module, RotaryEmbedding):
                yield from ((f"{path}.cos", module.cos), (f"{path}.sin", module.sin))
        yield from self.named_parameters()

    def lora_layers(self) -> Iterator[LoraLayer]:
        """Yield every layer that has adapter slots."""
        return (module for module in self.modules() if isinstance(module, LoraLayer))
