"""`make_tiny_llama`: a small random Llama on disk, every feature of a checkpoint an option.

Written with torch, safetensors and tokenizers alone, so that the demo needs no transformers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minilora.config.checks import check_choice, check_int, strict_keywords
from minilora.config.errors import ConfigError
from minilora.config.model import ARCHITECTURES, LAYER_MODULES
from minilora.testing.tiny_tokenizer import BOS, EOS, write_tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WHERE = "make_tiny_llama: "

# Gain of each projection: how much larger its output is than its input, before any bias. Chosen
# by looking at greedy answers and at rounding errors. q and k give attention scores a spread of
# about 1, so that it prefers a few positions; o and down add a few times the size of a token's
# embedding over all layers, so that the answer depends on the context and not on the last token
# alone. Larger gains make answers more varied, and rounding errors grow faster than that.
_GAINS = {
    "q_proj": 1.1, "k_proj": 1.1, "v_proj": 1.0, "o_proj": 1.5,
    "gate_proj": 1.0, "up_proj": 1.0, "down_proj": 3.0,
}  # fmt: skip
_LOGIT_STD = 4.0


def make_tiny_llama(folder: str | Path, **options: Any) -> Path:
    """Write a random Llama as a Hugging Face folder; `options` are the fields of `TinyLlama`.

    With the defaults it is the model of the parity tests. The same seed gives the same
    weight to a tensor of the same name and shape, whatever the other options are (with another
    number of layers, o_proj and down_proj differ by a factor). Of the greedy tokens, one in
    70,000 wins by less than 1e-6 of the logits' range; float32 rounding is about that.

    Raises:
        ConfigError: an option that does not exist, or does not fit the others.

    Examples:
        >>> import tempfile
        >>> folder = make_tiny_llama(tempfile.mkdtemp(), num_hidden_layers=3)
        >>> sorted(path.name for path in folder.iterdir())[:2]
        ['config.json', 'generation_config.json']
    """
    tiny = TinyLlama(**options)
    return write_checkpoint(
        Path(folder),
        tiny.config(),
        tiny.tensors(),
        shards=tiny.shards,
        tokenizer=tiny.tokenizer,
        chat_template=tiny.chat_template,
    )


@strict_keywords
@dataclass(frozen=True)
class TinyLlama:
    """What `make_tiny_llama` can be asked for; names are those of `config.json` where it has them.

    Attributes:
        head_dim: None is ``hidden_size / num_attention_heads`` and leaves the key out.
        rope_scaling: fields of a scaling, e.g. ``{"rope_type": "linear", "factor": 2.0}``.
        rope_spelling: "rope_scaling" with a `rope_theta` beside it, or "rope_parameters", which
            transformers 5 writes, with everything in it.
        dtype: of the weights: "float32", "float16" or "bfloat16".
        shards: number of safetensors files; with more than one there is an index.
        tokenizer: write a byte-level tokenizer.json (needs a `vocab_size` of 246 or more).
        chat_template: write a chat template into tokenizer_config.json.
        eos_token_id: one id, several, or None; also in generation_config.json.
        extra_config: keys laid over config.json at the end, e.g. ``{"head_dim": None}``.
    """

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 172
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_spelling: str = "rope_scaling"
    architecture: str = "LlamaForCausalLM"
    dtype: str = "float32"
    shards: int = 1
    tokenizer: bool = True
    chat_template: bool = True
    eos_token_id: int | Sequence[int] | None = EOS
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(_WHERE, "dtype", self.dtype, tuple(DTYPES))
        check_choice(_WHERE, "architecture", self.architecture, ARCHITECTURES)
        check_choice(_WHERE, "rope_spelling", self.rope_spelling, _ROPE_SPELLINGS)
        check_int(_WHERE, "shards", self.shards, 1, 1000)
        if self.architecture.startswith("Mistral") and (self.attention_bias or self.mlp_bias):
            raise ConfigError(f"{_WHERE}a Mistral has no attention_bias and no mlp_bias")

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        plain = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
            " num_key_value_heads max_position_embeddings rms_norm_eps tie_word_embeddings"
        )
        config = {name: getattr(self, name) for name in plain.split()}
        config |= {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "hidden_act": "silu",
            "bos_token_id": BOS,
            "eos_token_id": _plain_ids(self.eos_token_id),
        }
        if self.head_dim is not None:
            config["head_dim"] = self.head_dim
        if config["model_type"] == "mistral":
            config["sliding_window"] = None  # left out, it would be transformers' default, 4096
        else:
            config |= {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        return {**config, **_rope_and_dtype(self), **self.extra_config}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the checkpoint by its name."""
        dtype = DTYPES[self.dtype]
        return {name: self._random(name, shape).to(dtype) for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        head_dim = self.head_dim or hidden // self.num_attention_heads
        q, kv = self.num_attention_heads * head_dim, self.num_key_value_heads * head_dim
        weights = {
            "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
            "o_proj": (hidden, q), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for name, part in LAYER_MODULES.items():
                shapes[f"{prefix}.{part}.{name}.weight"] = weights[name]
                if self.attention_bias if part == "self_attn" else self.mlp_bias:
                    shapes[f"{prefix}.{part}.{name}.bias"] = weights[name][:1]
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _random(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = random_normal(shape, name, self.seed)
        module, kind = name.split(".")[-2:]
        if kind == "bias":
            return noise.mul_(0.1)
        if module.endswith("norm"):
            # Without the signs, a tied head would find the last token's own embedding again in
            # the hidden state, and the answer would be that token repeated.
            signs = noise.sign() if name == "model.norm.weight" else 1.0
            return noise.mul(0.1).add(1.0) * signs
        gain = _GAINS.get(module, _LOGIT_STD)
        if module in ("o_proj", "down_proj"):
            gain *= math.sqrt(2 / self.num_hidden_layers)
        return noise.mul_(gain / math.sqrt(shape[1]))


_ROPE_SPELLINGS = ("rope_scaling", "rope_parameters")


def _rope_and_dtype(tiny: TinyLlama) -> dict[str, Any]:
    """Return the keys whose names changed with transformers 5, in one of the two spellings."""
    scaling = None if tiny.rope_scaling is None else dict(tiny.rope_scaling)
    if tiny.rope_spelling == "rope_scaling":
        old = {"rope_theta": tiny.rope_theta, "rope_scaling": scaling}
        return {**old, "torch_dtype": tiny.dtype}
    new = {"rope_type": "default", "rope_theta": tiny.rope_theta, **(scaling or {})}
    return {"rope_parameters": new, "dtype": tiny.dtype}


def _plain_ids(ids: int | Sequence[int] | None) -> int | list[int] | None:
    return ids if ids is None or isinstance(ids, int) else list(ids)


def random_normal(shape: tuple[int, ...], name: str, seed: int) -> torch.Tensor:
    """Return float32 standard normal numbers that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
    tokenizer: bool = False,
    chat_template: bool = False,
) -> Path:
    """Write config, weights, generation_config.json and the tokenizer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", ids)
    _write_weights(folder, dict(tensors), shards)
    if tokenizer:
        length = config["max_position_embeddings"]
        write_tokenizer(folder, config["vocab_size"], length, chat_template)
    return folder


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as Hugging Face does: two spaces, a line feed at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Write `model.safetensors`, or several files of neighbouring tensors and their index."""
    metadata = {"format": "pt"}  # transformers refuses a file without it
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    per_shard = math.ceil(len(names) / shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        some = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: tensors[name] for name in some}, folder / file, metadata)
        weight_map |= dict.fromkeys(some, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
