"""A tiny model and adapters for commands that were given none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minilora.config.errors import ConfigError

# Small enough that the checks end within a minute on two slow cores, with more adapters than slots.
TINY_OPTIONS: dict[str, Any] = {
    "max_loras": 2,
    "max_num_seqs": 9,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_kv_blocks": 100,
}


def make_tiny(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a random Llama and three adapters of ranks 2, 5 and 8 by name."""
    from minilora.testing import make_tiny_adapter, make_tiny_llama

    model = make_tiny_llama(folder / "model")
    kinds: dict[str, dict[str, Any]] = {
        "rank-2": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "rank-5": {"r": 5, "target_modules": "all-linear"},
        "rank-8": {"r": 8, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    }
    adapters = {
        name: str(make_tiny_adapter(folder / name, model, seed=seed, **options))
        for seed, (name, options) in enumerate(kinds.items())
    }
    return str(model), adapters


def best_graph(device: str) -> str:
    """Return the graphs to show on a device: CUDA's where it has them, recorded ones elsewhere."""
    import torch

    return "cuda" if torch.cuda.is_available() and device != "cpu" else "recorded"


def parse_loras(given: list[str], model: str | None) -> dict[str, str]:
    """Read ``NAME=DIR`` flags.

    Raises:
        ConfigError: one has another form, a name comes twice, or there is no --model.
    """
    if given and model is None:
        raise ConfigError("--lora needs --model: the made model brings its own adapters")
    adapters: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name.strip() and equals and path):
            raise ConfigError(f"--lora {text!r} must be NAME=DIR")
        if name in adapters:
            raise ConfigError(f"--lora {name!r} is given twice; an adapter has one folder")
        adapters[name] = path
    return adapters
