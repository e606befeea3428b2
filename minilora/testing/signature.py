"""The signature model: a hand-set Llama whose next token alone says which adapter served a row.

Coordinates of the hidden state: 0 is on for every token, and ``1 + t`` stands for token t. The
embedding of t switches on both; row ``t + 1`` of lm_head looks at coordinate ``1 + t``, so the
base answers t + 1. Attention averages over the context (q = k = 0) and, like the MLP, adds
nothing until an adapter makes it. No tolerance is needed to compare answers: the winning logit is
at least ten times every other one, in half precision too (less where requests with different "v"
adapters share a KV cache: then the majority wins).

There is no tokenizer: prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from minilora.config.checks import check_choice, check_int
from minilora.config.model import ModelConfig
from minilora.testing.tiny import DTYPES, TinyLlama, write_checkpoint
from minilora.testing.tiny_adapter import lora_config, lora_tensors, write_adapter

VOCAB_SIZE, HIDDEN_SIZE, HEAD_DIM = 32, 64, 16
_STRENGTH = 30.0  # of an adapter; the token itself has 1
_WHERE = "make_signature_adapter: "


def make_signature_llama(
    folder: str | Path,
    *,
    num_hidden_layers: int = 2,
    max_position_embeddings: int = 1024,
    eos_token_id: int | Sequence[int] | None = None,
    dtype: str = "float32",
) -> Path:
    """Write the signature model: after token t it answers ``t + 1`` (after 31, 0)."""
    shape = TinyLlama(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=num_hidden_layers,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=eos_token_id,
        dtype=dtype,
    )
    tensors = {name: torch.zeros_like(tensor) for name, tensor in shape.tensors().items()}
    for name, tensor in tensors.items():
        _set_by_hand(name.split(".")[-2], tensor)
    return write_checkpoint(Path(folder), shape.config(), tensors)


def _set_by_hand(module: str, weight: torch.Tensor) -> None:
    """Fill the weight of one module; q, k, v and down stay zero."""
    tokens, dims = torch.arange(VOCAB_SIZE), torch.arange(HEAD_DIM)
    if module.endswith("norm"):
        weight.fill_(1.0)
    elif module == "embed_tokens":
        weight[:, 0] = 1.0
        weight[tokens, 1 + tokens] = 1.0
    elif module == "lm_head":
        weight[(tokens + 1) % VOCAB_SIZE, 1 + tokens] = 1.0
    elif module in ("gate_proj", "up_proj"):
        weight[0, 0] = 1.0  # activation 0 of the MLP is on for every token
    elif module == "o_proj":
        weight[1 + dims, dims] = 1.0  # dim c of head 0 stands for coordinate 1 + c


def make_signature_adapter(
    folder: str | Path,
    model_folder: str | Path,
    *,
    kind: str = "down",
    token: int,
    r: int = 2,
    lora_alpha: float | None = None,
    dtype: str = "float32",
) -> Path:
    """Write an adapter of the signature model that always answers `token`.

    Every one of the `r` ranks carries an equal part of the answer.

    Args:
        folder: where it goes.
        model_folder: of `make_signature_llama`.
        kind: "down" changes down_proj alone. "v" changes v_proj alone and so stamps the token
            into the KV cache: a later request that reuses those entries shows it, as long as
            they are more than half of its context.
        token: 0 to 31 for "down", 1 to 16 for "v".
        r: rank.
        lora_alpha: None is `r`, so that the scaling is 1; 0 is an adapter that does nothing.
        dtype: of the tensors.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_choice(_WHERE, "kind", kind, ("down", "v"))
    check_choice(_WHERE, "dtype", dtype, tuple(DTYPES))
    check_int(_WHERE, "r", r, 1, 1 << 16)
    low, high = (0, VOCAB_SIZE - 1) if kind == "down" else (1, HEAD_DIM)
    check_int(_WHERE, "token", token, low, high)
    tensors: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in ModelConfig.from_folder(model_folder).lora_modules().items():
        if name.endswith(f".{kind}_proj"):
            a, b = _signature(kind, token, torch.zeros(r, inputs), torch.zeros(outputs, r))
            tensors |= lora_tensors(name, a.to(DTYPES[dtype]), b.to(DTYPES[dtype]))
    config = {
        **lora_config(Path(model_folder)),
        "r": r,
        "lora_alpha": r if lora_alpha is None else lora_alpha,
        "target_modules": [f"{kind}_proj"],
    }
    write_adapter(Path(folder), config, tensors)
    return Path(folder)


def _signature(
    kind: str, token: int, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill A ``[r, in]`` and B ``[out, r]`` so that they switch `token` on, whatever the input."""
    a[:, 0] = 1.0  # activation 0 of the MLP, or coordinate 0 of the hidden state
    # The coordinate that row `token` of lm_head looks at, or the dim that o_proj copies to it.
    row = (token - 1) % VOCAB_SIZE + 1 if kind == "down" else token - 1
    b[row] = _STRENGTH / len(a)
    return a, b
