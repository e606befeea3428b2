"""`ModelConfig`: the model that a Hugging Face `config.json` describes.

A key that could change the maths is either understood or refused by name; only keys
listed as harmless are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minilora.config.checks import check_bool, check_choice, check_int, check_number
from minilora.config.errors import CheckpointError, ConfigError, shown
from minilora.config.json_file import read_json_object
from minilora.config.rope import RopeConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
LAYER_MODULES = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip

_WHERE = "config.json: "
_USED = frozenset(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings"
    " attention_bias mlp_bias hidden_act rope_theta rope_scaling rope_parameters sliding_window"
    " eos_token_id dtype torch_dtype model_type".split()
)
_HARMLESS = frozenset(
    # bookkeeping
    "transformers_version model_name pad_token_id unk_token_id sep_token_id use_cache"
    " initializer_range pretraining_tp attention_dropout hidden_dropout resid_dropout"
    " embd_dropout return_dict output_attentions output_hidden_states return_dict_in_generate"
    " output_scores use_bfloat16 is_llama_config id2label label2id finetuning_task problem_type"
    " task_specific_params tokenizer_class prefix torchscript auto_map gradient_checkpointing"
    " max_sequence_length max_window_layers is_decoder decoder_start_token_id"
    # defaults of generation that old transformers wrote here; minilora reads SamplingParams
    " max_length min_length do_sample early_stopping num_beams num_beam_groups"
    " diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences"
    " exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
    " bos_token_id forced_bos_token_id forced_eos_token_id remove_invalid_values tf_legacy_loss"
    " transformers.js_config unsloth_fixed unsloth_version chunk_size_feed_forward".split()
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one Llama-shaped model; names are those of `config.json`.

    Attributes:
        head_dim: width of one attention head; need not be ``hidden_size / heads``.
        eos_token_ids: every token that ends an answer.
        dtype: of the checkpoint's weights, "float32", "float16" or "bfloat16".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder, and the end tokens of generation_config.json.

        Raises:
            CheckpointError: the folder or file is missing, too large, or no JSON object.
            ConfigError: a field is missing, out of range or not supported; it is named.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"model={str(folder)!r} is no folder; give a checkpoint's folder")
        config = cls.from_dict(read_json_object(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.exists():
            return config
        given = read_json_object(generation).get("eos_token_id")
        if given is None:
            return config
        ids = _end_tokens("generation_config.json: ", given, config.vocab_size)
        return cls(**{**config.__dict__, "eos_token_ids": ids})

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Check the content of a `config.json`; see `from_folder` for the errors."""
        _refuse_what_changes_the_maths(config)
        sizes = _sizes(config)
        return cls(
            **sizes,
            rms_norm_eps=check_number(
                _WHERE, "rms_norm_eps", config.get("rms_norm_eps", 1e-6), 0, 1
            ),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            rope=RopeConfig.from_config(config),
            eos_token_ids=_end_tokens(_WHERE, config.get("eos_token_id"), sizes["vocab_size"]),
            dtype=_dtype(config),
        )

    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """Return every module that an adapter can change: full name -> (in, out) features.

        Names are those of transformers (``model.layers.0.self_attn.q_proj``,
        ``model.embed_tokens``, ``lm_head``); "in" of the embedding is the vocabulary.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        q = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        shapes = {
            "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv),
            "o_proj": (q, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }  # fmt: skip
        modules = {"model.embed_tokens": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            for name, part in LAYER_MODULES.items():
                modules[f"model.layers.{layer}.{part}.{name}"] = shapes[name]
        modules["lm_head"] = (hidden, self.vocab_size)
        return modules


def _refuse_what_changes_the_maths(config: Mapping[str, Any]) -> None:
    kind = check_choice(
        _WHERE, "model_type", config.get("model_type", "llama"), ("llama", "mistral")
    )
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{_WHERE}architectures={shown(architectures)} is not supported; "
            f"minilora runs {' and '.join(ARCHITECTURES)}"
        )
    check_choice(_WHERE, "hidden_act", config.get("hidden_act", "silu"), ("silu", "swish"))
    # transformers gives a Mistral without the key a window of 4096 tokens.
    mistral = kind == "mistral" or architectures[0].startswith("Mistral")
    window = config.get("sliding_window", 4096 if mistral else None)
    if window is not None:
        raise ConfigError(
            f"{_WHERE}sliding_window={shown(window)} is not supported; "
            "minilora attends to the whole context (null)"
        )
    for key, value in config.items():
        harmless = key in _USED or key in _HARMLESS or key.startswith("_")
        silent = value is None or value is False or value in ([], {})
        if not (harmless or silent):
            raise ConfigError(
                f"{_WHERE}{shown(key)[1:-1]}={shown(value)} is unknown to minilora and may change "
                "what the model computes; remove the key if it does not"
            )


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    def size(name: str, high: int, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{_WHERE}{name} is missing")
        return check_int(_WHERE, name, value, 1, high)

    heads = size("num_attention_heads", 4096)
    hidden = size("hidden_size", 1 << 18)
    kv_heads = size("num_key_value_heads", 4096, heads)
    head_dim = size("head_dim", 4096, max(1, hidden // heads))
    if heads % kv_heads:
        raise ConfigError(
            f"{_WHERE}num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{_WHERE}head_dim={head_dim} must be even for rotary embeddings")
    return {
        "vocab_size": size("vocab_size", 1 << 24),
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size", 1 << 20),
        "num_hidden_layers": size("num_hidden_layers", 4096),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": size("max_position_embeddings", 1 << 24, 2048),
    }


def _flag(config: Mapping[str, Any], name: str) -> bool:
    return check_bool(_WHERE, name, config.get(name, False))


def _dtype(config: Mapping[str, Any]) -> str:
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = "dtype" if config.get("dtype") else "torch_dtype"
    return check_choice(_WHERE, name, given, ("float32", "float16", "bfloat16"))


def _end_tokens(where: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    return tuple(check_int(where, "eos_token_id", token, 0, vocab_size - 1) for token in tokens)
