"""Tensors that do not fit the model or the config: all are listed, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.adapter_folders import (
    EMBEDDING,
    HEAD,
    PREFIX,
    WEIGHTS_FILE,
    Q,
    V,
    keys,
    lora,
    refusal,
    write,
)

KEY_A, KEY_B = keys(Q)


def change(key: str, tensor: torch.Tensor | None) -> Callable[[Path], Path]:
    """Return a maker of an adapter of q_proj and v_proj with one tensor changed or left out."""

    def make(folder: Path) -> Path:
        tensors = lora(Q, V) | ({} if tensor is None else {key: tensor})
        if tensor is None:
            del tensors[key]
        return write(folder, tensors)

    return make


OTHER = f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight"
EMBED_A, EMBED_B = keys(EMBEDDING)
MISFITS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "unknown_module": (
        change(OTHER, torch.ones(8, 32)),
        ["1 of its 5 tensors does not fit the model", OTHER, "the model has no such module"],
    ),
    "unknown_kind": (
        change(f"{PREFIX}{Q}.lora_E", torch.ones(8, 1)),
        ["1 of its 5 tensors", f"'{PREFIX}{Q}.lora_E' (no tensor of LoRA)"],
    ),
    "base_of_a_projection": (
        change(f"{PREFIX}{Q}.base_layer.weight", torch.ones(32, 32)),
        [f"'{PREFIX}{Q}.base_layer.weight' (no tensor of LoRA)"],
    ),
    "in_features": (
        change(KEY_A, torch.ones(8, 31)),
        [KEY_A, "the shape (8, 31)", "ask for (8, 32)"],
    ),
    "out_features": (
        change(KEY_B, torch.ones(31, 8)),
        [KEY_B, "the shape (31, 8)", "ask for (32, 8)"],
    ),
    "transposed": (change(KEY_A, torch.ones(32, 8)), [KEY_A, "(32, 8)", "ask for (8, 32)"]),
    "one_dimension": (change(KEY_A, torch.ones(256)), [KEY_A, "(256,)", "ask for (8, 32)"]),
    "three_dimensions": (change(KEY_A, torch.ones(8, 32, 1)), [KEY_A, "(8, 32, 1)"]),
    "scalar": (change(KEY_A, torch.tensor(1.0)), [KEY_A, "the shape ()"]),
    "rank_of_a": (
        change(KEY_A, torch.ones(4, 32)),
        [KEY_A, "(4, 32)", "the model and r=8 of adapter_config.json ask for (8, 32)"],
    ),
    "rank_of_b": (change(KEY_B, torch.ones(32, 4)), [KEY_B, "(32, 4)", "r=8", "ask for (32, 8)"]),
    "zero_size": (change(KEY_A, torch.ones(0)), [KEY_A, "the shape (0,) holds no weights"]),
    "zero_rank": (change(KEY_B, torch.ones(32, 0)), [KEY_B, "(32, 0) holds no weights"]),
    "b_missing": (change(KEY_B, None), [KEY_A, "its lora_B is missing"]),
    "a_missing": (change(KEY_A, None), [KEY_B, "its lora_A is missing"]),
    "linear_names_on_the_embedding": (
        change(f"{PREFIX}{EMBEDDING}.lora_A.weight", torch.ones(8, 64)),
        ["model.embed_tokens takes lora_embedding_A and lora_embedding_B"],
    ),
    "embedding_names_on_a_layer": (
        change(f"{PREFIX}{HEAD}.lora_embedding_A", torch.ones(8, 32)),
        ["lm_head takes lora_A and lora_B"],
    ),
    "a_larger_vocabulary": (
        lambda folder: write(
            folder, {EMBED_A: torch.ones(8, 72), EMBED_B: torch.ones(32, 8)}, target_modules=None
        ),
        [EMBED_A, "(8, 72)", "ask for (8, 64)"],
    ),
    "twice_with_and_without_prefix": (
        change(KEY_A.removeprefix(PREFIX), torch.ones(8, 32)),
        [f"a second lora_A of {Q}"],
    ),
    **{
        str(dtype).removeprefix("torch."): (
            change(KEY_A, torch.ones(8, 32, dtype=dtype)),
            [KEY_A, "the dtype ", "minilora reads float64, float32, float16, bfloat16"],
        )
        for dtype in (
            torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        )
    },
    "not_targeted": (
        lambda folder: write(folder, target_modules=["q_proj"]),
        ["2 of its 4 tensors do not fit", *keys(V), "adapter_config.json does not target it"],
    ),
    "not_targeted_layer": (
        lambda folder: write(folder, layers_to_transform=[0]),
        [*keys(V), "does not target it"],
    ),
    "excluded": (
        lambda folder: write(folder, exclude_modules=r".*v_proj"),
        [*keys(V), "does not target it"],
    ),
    "head_with_all_linear": (
        lambda folder: write(folder, lora(Q, HEAD), target_modules="all-linear"),
        [*keys(HEAD), "does not target it"],
    ),
    "of_another_model": (
        lambda folder: write(
            folder,
            {
                f"{PREFIX}transformer.h.{layer}.attn.c_attn.lora_{half}.weight": torch.ones(8, 8)
                for layer in range(20)
                for half in "AB"
            },
        ),
        ["none of its 40 tensors fits the model", "the model has no such module", "and 28 more"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_are_listed(tmp_path: Path, name: str) -> None:
    make, parts = MISFITS[name]
    text = refusal(make(tmp_path), WEIGHTS_FILE)
    for part in parts:
        assert part in text


def test_several_misfits_are_in_one_message(tmp_path: Path) -> None:
    tensors = lora(Q, V) | {KEY_A: torch.ones(3, 3), OTHER: torch.ones(8, 32)}
    text = refusal(write(tmp_path, tensors), WEIGHTS_FILE)
    assert "2 of its 5 tensors do not fit" in text
    assert KEY_A in text
    assert OTHER in text


def test_tensors_of_two_adapters(tmp_path: Path) -> None:
    tensors = {
        key.replace(".weight", f".{name}.weight"): tensor
        for module, name in ((Q, "default"), (V, "other"))
        for key, tensor in lora(module).items()
    }
    text = refusal(write(tmp_path, tensors), WEIGHTS_FILE)
    assert "it holds the tensors of several adapters, 'default', 'other'" in text
