"""Adapters that are refused: every message names the adapter, the file and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapter_folders import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    PREFIX,
    WEIGHTS_FILE,
    Q,
    V,
    keys,
    load,
    lora,
    refusal,
    write,
)

KEY_A, KEY_B = keys(Q)


# (field, value) -> what the message says of it
UNSUPPORTED: list[tuple[str, Any]] = [
    ("use_dora", True),
    ("lora_bias", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("modules_to_save", ["lm_head"]),
    ("fan_in_fan_out", True),
    ("trainable_token_indices", [1, 2]),
    ("trainable_token_indices", {"embed_tokens": [1]}),
    ("layer_replication", [[0, 1], [0, 2]]),
    ("ensure_weight_tying", True),
    ("target_parameters", ["mlp.experts.down_proj"]),
    ("alora_invocation_tokens", [7, 8]),
    ("use_qalora", True),
    ("use_bdlora", {"nblocks": 2}),
    ("arrow_config", {"top_k": 3}),
    ("monteclora_config", {"num_samples": 8}),
    ("kasa_config", {"beta": 1e-4}),
    ("velora_config", {"num_groups": 64}),
    ("megatron_config", {"hidden_size": 32}),
    *[
        ("init_lora_weights", init)
        for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new", 1, [])
    ],
    ("a_field_of_next_year", True),
    ("a_field_of_next_year", 0.5),
    ("enable_lora", [True, False, True]),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_l6_a_feature_is_refused_by_its_name(tmp_path: Path, field: str, value: Any) -> None:
    text = refusal(write(tmp_path, **{field: value}), WEIGHTS_FILE)
    assert "features that minilora does not support" in text
    assert f"{field}={value!r}" in text
    unknown = field in ("a_field_of_next_year", "enable_lora")
    assert ("unknown to minilora" in text) == unknown


HARMLESS: dict[str, Any] = {
    "base_model_name_or_path": "x/y",
    "revision": "main",
    "task_type": "CAUSAL_LM",
    "inference_mode": False,
    "peft_version": "0.99",
    "auto_mapping": {"parent_library": "x"},
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"stable_gamma": 16},
    "runtime_config": {"ephemeral_gpu_offload": False},
    "merge_weights": True,
    "modules_to_save": [],
    "use_dora": False,
    "layer_replication": None,
    "a_field_of_next_year": {},
    "rank_pattern": None,
    "use_rslora": None,
    "bias": "none",
}


def test_harmless_fields_are_passed_over(tmp_path: Path) -> None:
    assert set(load(write(tmp_path, **HARMLESS)).modules) == {Q, V}
    for init in (True, False, None, "gaussian", "orthogonal", "eva", "mica", "Gaussian"):
        load(write(tmp_path, init_lora_weights=init))


FEATURE_TENSORS = {
    f"{PREFIX}{Q}.lora_magnitude_vector": "use_dora",
    f"{PREFIX}{Q}.lora_magnitude_vector.default.weight": "use_dora",
    f"{PREFIX}{Q}.lora_B.bias": "lora_bias",
    f"{PREFIX}{Q}.bias": "bias",
    f"{PREFIX}{Q}.base_layer.bias": "bias",
    f"{PREFIX}{HEAD}.weight": "modules_to_save",
    f"{HEAD}.weight": "modules_to_save",
    f"{PREFIX}{EMBEDDING}.weight": "modules_to_save",
    f"{PREFIX}model.norm.weight": "modules_to_save",
    f"{PREFIX}{HEAD}.modules_to_save.default.weight": "modules_to_save",
    f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta": "trainable_token_indices",
}


@pytest.mark.parametrize("key", FEATURE_TENSORS)
def test_l3_a_tensor_of_a_feature_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    text = refusal(write(tmp_path, lora(Q) | {key: torch.ones(32)}), WEIGHTS_FILE)
    assert f"{FEATURE_TENSORS[key]} (tensors '{key}')" in text


def test_all_features_are_in_one_message(tmp_path: Path) -> None:
    tensors = lora(Q) | {f"{HEAD}.weight": torch.ones(2), f"{PREFIX}{Q}.lora_B.bias": torch.ones(2)}
    fields = {
        "use_dora": True,
        "bias": "all",
        "init_lora_weights": "pissa",
        "kasa_config": {"x": 1},
    }
    text = refusal(write(tmp_path, tensors, **fields), WEIGHTS_FILE)
    for name in (*fields, "lora_bias", f"'{HEAD}.weight'"):
        assert name in text


NOT_GIVEN = object()
BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("peft_type", "IA3", "peft_type='IA3' is not supported"),
    ("peft_type", NOT_GIVEN, "peft_type=None"),
    ("peft_type", ["LORA"], "peft_type="),
    ("r", NOT_GIVEN, "r is missing"),
    ("lora_alpha", NOT_GIVEN, "lora_alpha is missing"),
    *[("r", value, f"r={value!r} must be an integer") for value in (0, -5, "8", 8.0, None, True)],
    ("r", 1 << 40, "must be an integer"),
    *[("lora_alpha", v, "lora_alpha=") for v in ("16", None, True, [16], 1e30)],
    ("lora_alpha", float("nan"), "lora_alpha=nan must be a number"),
    ("lora_alpha", float("inf"), "lora_alpha=inf must be a number"),
    ("use_rslora", "yes", "use_rslora='yes' must be true or false"),
    ("use_rslora", 1, "use_rslora=1 must be true or false"),
    ("rank_pattern", ["q_proj"], "rank_pattern=['q_proj'] must be an object"),
    ("rank_pattern", {"q_proj": 0}, "rank_pattern['q_proj']=0 must be an integer"),
    ("rank_pattern", {"q_proj": "8"}, "rank_pattern['q_proj']='8' must be an integer"),
    ("alpha_pattern", {"q_proj": "8"}, "alpha_pattern['q_proj']='8' must be a number"),
    ("alpha_pattern", "q_proj", "alpha_pattern='q_proj' must be an object"),
    ("alpha_pattern", {"(": 8}, "alpha_pattern: '(' is no regex"),
    ("target_modules", 5, "target_modules=5 must be a list of module names or a regex"),
    ("target_modules", ["q_proj", 5], "target_modules="),
    ("target_modules", {"q_proj": 1}, "target_modules="),
    ("target_modules", "*", "target_modules: '*' is no regex"),
    ("exclude_modules", 5, "exclude_modules=5 must be a list"),
    ("exclude_modules", "[", "exclude_modules: '[' is no regex"),
    ("layers_to_transform", "0", "layers_to_transform='0' must be an integer"),
    ("layers_to_transform", [0.5], "layers_to_transform=0.5 must be an integer"),
    ("layers_to_transform", -1, "layers_to_transform=-1 must be an integer"),
    ("layers_pattern", "layers", "layers_pattern needs layers_to_transform"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD_FIELDS)
def test_l8_a_bad_field_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    without = (field,) if value is NOT_GIVEN else ()
    fields = {} if value is NOT_GIVEN else {field: value}
    folder = write(tmp_path, without=without, **fields)
    assert message in refusal(folder, CONFIG_FILE)


BAD_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ".*", "layers_to_transform": 0}, "layers_to_transform needs target_mod"),
    ({"target_modules": "all-linear", "layers_pattern": "h"}, "layers_pattern needs target_mod"),
    ({"layers_to_transform": 0, "layers_pattern": "h|layers"}, "a list instead of using '|'"),
    ({"layers_to_transform": 0, "layers_pattern": [5]}, "layers_pattern must hold texts, not 5"),
    ({"layers_to_transform": 0, "layers_pattern": "("}, "layers_pattern: '(' is no regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_LAYERS)
def test_bad_layer_fields(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert message in refusal(write(tmp_path, **fields), CONFIG_FILE)


def test_l13_u3_a_rank_over_the_limit(tmp_path: Path) -> None:
    load(write(tmp_path / "8"), max_lora_rank=8)
    text = refusal(write(tmp_path / "9", lora(Q, r=9), r=9), WEIGHTS_FILE, max_lora_rank=8)
    assert f"the rank 9 of {Q} is over max_lora_rank=8; start with max_lora_rank=9 or more" in text
    text = refusal(write(tmp_path / "64", lora(Q, r=64), r=64), WEIGHTS_FILE)
    assert f"the rank 64 of {Q} is over max_lora_rank=16; start with max_lora_rank=64" in text
    text = refusal(write(tmp_path / "512", lora(Q, r=512), r=512), WEIGHTS_FILE)
    assert "minilora serves ranks up to 256" in text


@pytest.mark.parametrize("modules", [[Q], [V], [EMBEDDING], [HEAD]])
@pytest.mark.parametrize(
    ("tensor_r", "fields"),
    [
        (8, {"r": 64}),
        (64, {}),
        (8, {"rank_pattern": {".*": 64}}),
        (64, {"rank_pattern": {".*": 64}}),
    ],
)
def test_l13_a_rank_is_found_wherever_it_is(
    tmp_path: Path, modules: list[str], tensor_r: int, fields: dict[str, Any]
) -> None:
    text = refusal(write(tmp_path, lora(*modules, r=tensor_r), **fields), WEIGHTS_FILE)
    assert f"the rank 64 of {modules[0]} is over max_lora_rank=16" in text


def test_a_pattern_lowers_a_rank_that_is_over_the_limit(tmp_path: Path) -> None:
    write(tmp_path, lora(Q, r=8), r=64, rank_pattern={"q_proj": 8})
    assert load(tmp_path).max_rank == 8


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, value: float, file_format: str) -> None:
    for key in (KEY_A, KEY_B):
        tensors = lora(Q, V)
        tensors[key][3, 5] = value
        text = refusal(write(tmp_path, tensors, file_format), f"adapter_model.{file_format}")
        assert f"'{key}' holds NaN or infinity" in text


def test_values_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    tensors = lora(Q)
    tensors[KEY_A][0, 0] = 1e6
    write(tmp_path, tensors)
    load(tmp_path, dtype=torch.bfloat16)
    text = refusal(tmp_path, WEIGHTS_FILE, dtype=torch.float16)
    assert f"'{KEY_A}' holds NaN or infinity (as torch.float16)" in text


def test_a_scaling_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    """The slots hold B times its scaling."""
    write(tmp_path, lora(Q), lora_alpha=1e6)
    load(tmp_path, dtype=torch.bfloat16)
    text = refusal(tmp_path, WEIGHTS_FILE, dtype=torch.float16)
    assert f"'{KEY_B}' times its scaling 125000 is not finite as torch.float16" in text


COPY = f"{PREFIX}{HEAD}.base_layer.weight"


def test_a_base_copy_that_differs(tmp_path: Path) -> None:
    weight = torch.randn(64, 32)
    write(tmp_path, lora(HEAD) | {COPY: weight.clone()})
    assert set(load(tmp_path, base_weight=lambda name: weight).modules) == {HEAD}
    other = weight.clone()
    other[63, 31] += 1e-3
    text = refusal(tmp_path, WEIGHTS_FILE, base_weight=lambda name: other)
    assert f"'{COPY}' differs from the model's own weight of lm_head" in text


def test_a_base_copy_without_the_base(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, lora(HEAD) | {COPY: torch.ones(64, 32)}), WEIGHTS_FILE)
    assert f"'{COPY}' is a copy of a base weight, which cannot be compared" in text


def test_a_base_copy_of_another_size(tmp_path: Path) -> None:
    write(tmp_path, lora(HEAD) | {COPY: torch.ones(72, 32)})
    text = refusal(tmp_path, WEIGHTS_FILE, base_weight=lambda name: torch.ones(64, 32))
    assert f"'{COPY}' has the shape (72, 32), but the weight of lm_head has (64, 32)" in text


def test_only_base_copies(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, {COPY: torch.ones(64, 32)}), WEIGHTS_FILE)
    assert "it holds no tensor of LoRA, so the adapter has no weights" in text


def test_u2_a_missing_folder_names_adapter_and_path(tmp_path: Path) -> None:
    text = refusal(tmp_path / "gone]")
    assert "is no folder; give the folder that PEFT saved" in text


def test_a_config_of_a_full_model_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert f"has no {CONFIG_FILE}" in refusal(tmp_path)
