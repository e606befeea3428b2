"""`ModelConfig` and `RopeConfig`: what a `config.json` may say, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora.config import CheckpointError, ConfigError, ModelConfig, RopeConfig
from minilora.config.json_file import MAX_CONFIG_BYTES, read_json_object
from minilora.model.layers import rope_frequencies
from tests.checkpoints import config_dict

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
THETA = {"rope_theta": 5e5}
HUGE = pytest.param(10**309, id="huge")  # an int that no float holds


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(config_dict(**changes))


def refused(match: str, **changes: Any) -> None:
    """The config is refused in one short line that matches."""
    with pytest.raises(ConfigError, match=match) as caught:
        read(**changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    assert len(message) < 400


# ---- sizes


def test_defaults_of_what_may_be_left_out() -> None:
    config = config_dict(num_key_value_heads=None)
    del config["max_position_embeddings"], config["architectures"], config["model_type"]
    assert ModelConfig.from_dict(config) == ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        dtype="float32",
    )


def test_head_dim() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert read(**sizes).head_dim == 16
    assert read(**sizes, head_dim=None).head_dim == 16
    assert read(**sizes, head_dim=32).head_dim == 32
    assert read(hidden_size=1792, num_attention_heads=24, head_dim=128).head_dim == 128


def test_lora_modules_follow_head_dim_and_kv_heads() -> None:
    modules = read(hidden_size=64, head_dim=24, intermediate_size=20).lora_modules()
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert {name: shape for name, shape in modules.items() if "layers.0" not in name} == {
        "model.embed_tokens": (32, 64),
        f"{attention}q_proj": (64, 96),
        f"{attention}k_proj": (64, 48),
        f"{attention}v_proj": (64, 48),
        f"{attention}o_proj": (96, 64),
        f"{mlp}gate_proj": (64, 20),
        f"{mlp}up_proj": (64, 20),
        f"{mlp}down_proj": (20, 64),
        "lm_head": (64, 32),
    }
    assert len(modules) == 2 * 7 + 2


SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, "8", True, [8], {}, 1 << 40, HUGE])
def test_a_size_out_of_range_is_named(name: str, value: object) -> None:
    refused(f"{name}=.* must be an integer from 1 to", **{name: value})


@pytest.mark.parametrize("name", SIZES[:5])
def test_a_missing_size_is_named(name: str) -> None:
    config = config_dict()
    del config[name]
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        ModelConfig.from_dict(config)
    refused(f"{name} is missing", **{name: None})


def test_sizes_that_do_not_go_together() -> None:
    refused("num_attention_heads=4 must be a multiple of num_key_value_heads=3", **heads(4, 3))
    refused("num_attention_heads=4 must be a multiple of num_key_value_heads=8", **heads(4, 8))
    refused("head_dim=5 must be even", head_dim=5)
    refused("head_dim=1 must be even", hidden_size=2)


def heads(query: int, kv: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv}


# ---- keys


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be one of 'silu'"),
        ({"hidden_act": None}, "hidden_act=None"),
        ({"sliding_window": 4096}, r"sliding_window=4096 is not supported"),
        ({"sliding_window": 0}, r"sliding_window=0 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "qwen2"}, "model_type='qwen2'"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures=\['Qwen2ForCausalLM'\]"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"architectures": [None]}, "architectures="),
        ({"architectures": {"a": 1}}, "architectures="),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 is unknown"),
        ({"embedding_multiplier": 12}, "embedding_multiplier=12 is unknown"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"clip_qkv": 6.0}, "clip_qkv"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_interleaved": True}, "rope_interleaved=True is unknown"),
        ({"Hidden_Act": "gelu"}, "Hidden_Act='gelu' is unknown"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(changes: dict[str, Any], match: str) -> None:
    refused(match, **changes)


@pytest.mark.parametrize("value", [0, 0.0, 1, "", "x", [0], {"a": 0}, True])
def test_an_unknown_key_with_a_value_is_refused(value: object) -> None:
    # 0 equals False in Python, but `logits_scaling: 0` is no switch that is off.
    refused("logits_scaling=.* is unknown", logits_scaling=value)


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_an_unknown_key_that_says_nothing_is_passed_over(value: object) -> None:
    assert read(rope_interleaved=value) == read()


def test_harmless_keys_change_nothing() -> None:
    harmless = {
        "transformers_version": "4.1",
        "use_cache": False,
        "initializer_range": 0.02,
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "pad_token_id": 7,
        "temperature": 0.6,
        "max_length": 4096,
        "tokenizer_class": "LlamaTokenizer",
        "transformers.js_config": {"dtype": "q4"},
        "_name_or_path": "somewhere",
        "_attn_implementation": "flash_attention_2",
    }
    assert read(**harmless) == read()


def test_a_mistral_has_a_window_unless_it_says_null() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read(**mistral, sliding_window=None) == read()
    refused("sliding_window=4096", **mistral)
    refused("sliding_window=1024", **mistral, sliding_window=1024)


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"]])
def test_model_type_alone_makes_a_mistral(architectures: object) -> None:
    # transformers goes by model_type, so the window is there whatever `architectures` says.
    refused("sliding_window=4096", model_type="mistral", architectures=architectures)


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_switches_are_true_or_false(name: str) -> None:
    assert getattr(read(**{name: True}), name) is True
    assert getattr(read(), name) is False
    wrong: list[object] = [1, 0, "true", None, []]
    for value in wrong:
        refused(f"{name}=.* must be true or false", **{name: value})


def test_dtype_under_both_names() -> None:
    assert read(torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(dtype="float16").dtype == "float16"
    assert read(dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(dtype=None, torch_dtype=None).dtype == "float32"
    refused("torch_dtype='float64' must be one of", torch_dtype="float64")
    refused("dtype='int8'", dtype="int8")
    refused("dtype=", dtype=["float32"])


@pytest.mark.parametrize("value", [-1e-6, 1.5, "1e-6", None, True, math.nan, math.inf, HUGE])
def test_rms_norm_eps_out_of_range(value: object) -> None:
    refused("rms_norm_eps=.* must be a number from 0 to 1", rms_norm_eps=value)


def test_rms_norm_eps() -> None:
    assert read(rms_norm_eps=1e-5).rms_norm_eps == 1e-5


@pytest.mark.parametrize("key", ["logits_scaling", "hidden_act", "head_dim", "eos_token_id"])
def test_a_huge_value_makes_no_huge_message(key: str) -> None:
    refused(key, **{key: "x" * 100_000})


def test_a_key_of_two_lines_makes_a_message_of_one() -> None:
    refused("scaling", **{"logits\nscaling": 2})
    refused("rope_scaling", rope_scaling={"long\nfactor": 2})


def test_a_huge_key_makes_no_huge_message() -> None:
    refused("xxx", **{"x" * 100_000: 2})
    refused("rope_scaling.*xxx", rope_scaling={"x" * 100_000: 2})


# ---- rotary embedding


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3},
        {"rope_theta": 1e4, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500_000, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": LLAMA3, **THETA},
    ],
)
def test_every_spelling_of_llama3(spelling: dict[str, Any]) -> None:
    assert read(**spelling).rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 128)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_every_spelling_of_linear(field: str, key: str) -> None:
    assert read(**{field: {key: "linear", "factor": 4}}).rope == RopeConfig("linear", factor=4.0)


@pytest.mark.parametrize("given", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_every_spelling_of_default(given: object) -> None:
    assert read(rope_scaling=given).rope == RopeConfig()
    assert read(rope_parameters=given, rope_theta=1e6).rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "", None, ["x"], 3])
def test_another_kind_of_rope_is_refused_by_name(kind: object) -> None:
    named = re.escape(f"rope_type={kind!r}")
    refused(f"rope_scaling has {named}", rope_scaling={"rope_type": kind, "factor": 2.0})
    refused(f"rope_parameters has {named}", rope_parameters={"rope_type": kind, "factor": 2.0})
    # The newer key decides, as in transformers.
    refused("rope_type", rope_scaling={"rope_type": kind, "type": "linear", "factor": 2.0})


@pytest.mark.parametrize("given", [[LLAMA3], "linear", 2.0, True])
def test_rope_must_be_an_object(given: object) -> None:
    refused("rope_scaling=.* must be an object", rope_scaling=given)


@pytest.mark.parametrize(
    ("scaling", "match"),
    [
        ({"factor": 2.0}, "rope_scaling.factor is unknown to rope_type='default'"),
        ({"type": "linear"}, "rope_scaling.factor is missing for rope_type='linear'"),
        ({"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor is unknown"),
        ({"type": "linear", "factor": 2.0, "attention_factor": 0}, "attention_factor is unknown"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is unk"),
        ({"rope_type": "default", "full_attention": {}}, "full_attention is unknown"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be less than"),
        ({**LLAMA3, "low_freq_factor": 5.0}, "low_freq_factor=5.0 must be less than"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({**LLAMA3, "original_max_position_embeddings": 8.5}, "original_max_position_embeddings"),
        *(
            ({k: v for k, v in LLAMA3.items() if k != lost}, f"{lost} is missing for rope_type")
            for lost in list(LLAMA3)[1:]
        ),
    ],
)
def test_a_field_of_rope_that_is_wrong(scaling: dict[str, Any], match: str) -> None:
    refused(match, rope_scaling=scaling)


@pytest.mark.parametrize("value", [0, -2.0, "8", None, True, math.nan, math.inf, [8.0], 1e9, HUGE])
def test_a_number_of_rope_out_of_range(value: object) -> None:
    refused("rope_scaling.factor=", rope_scaling={"type": "linear", "factor": value})
    refused("rope_scaling.factor=", rope_scaling={**LLAMA3, "factor": value})


@pytest.mark.parametrize("value", [0, 0.5, -1e4, "10000", None, math.nan, math.inf, HUGE, True])
def test_rope_theta_out_of_range(value: object) -> None:
    refused("rope_theta=", rope_theta=value)
    refused("rope_theta=", rope_parameters={"rope_type": "default", "rope_theta": value})


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, LINEAR),
        (LINEAR, {"rope_type": "default"}),
        (LINEAR, {**LINEAR, "factor": 4.0}),
        (LINEAR, LLAMA3),
        ({**LINEAR, "rope_theta": 1e4}, {**LINEAR, "rope_theta": 5e5}),
        ({**LINEAR, "rope_theta": 5e5}, LINEAR),
        (LINEAR, {**LINEAR, "rope_theta": 5e5}),
    ],
)
def test_two_spellings_that_disagree_are_refused(new: dict[str, Any], old: dict[str, Any]) -> None:
    # transformers 5 takes all of rope_scaling here, theta too: nobody should guess.
    refused("rope_scaling.*rope_parameters", rope_parameters=new, rope_scaling=old)


def test_two_spellings_that_agree() -> None:
    old_keys = {"type": "linear", "factor": 2}
    assert read(rope_parameters=LINEAR, rope_scaling=old_keys).rope == RopeConfig(
        "linear", factor=2
    )


def test_frequencies() -> None:
    plain = [10000.0 ** (-i / 6) for i in (0, 2, 4)]
    assert rope_frequencies(RopeConfig(), 6).tolist() == pytest.approx(plain, rel=1e-6)
    linear = rope_frequencies(RopeConfig("linear", factor=4.0), 6)
    assert linear.tolist() == pytest.approx([f / 4 for f in plain], rel=1e-6)


def test_frequencies_of_llama3() -> None:
    """Written by wavelengths and branches, as the model card of Llama 3.1 has it."""
    rope, head_dim = RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192), 128
    got = rope_frequencies(rope, head_dim)
    kinds = set()
    for i, frequency in enumerate(got.tolist()):
        plain = 5e5 ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            want, kind = plain, "kept"
        elif wavelength > 8192 / 1.0:
            want, kind = plain / 8.0, "stretched"
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            want, kind = (1 - smooth) * plain / 8.0 + smooth * plain, "blended"
        assert frequency == pytest.approx(want, rel=2e-6)
        kinds.add(kind)
    assert kinds == {"kept", "stretched", "blended"}
    assert got.dtype == torch.float32


# ---- end tokens


@pytest.mark.parametrize(
    ("given", "want"), [(None, ()), (7, (7,)), ([30, 7], (30, 7)), ([], ()), (0, (0,)), (31, (31,))]
)
def test_end_tokens(given: object, want: tuple[int, ...]) -> None:
    assert read(eos_token_id=given).eos_token_ids == want


@pytest.mark.parametrize("given", [32, -1, "7", 7.0, True, [7, 32], [[7]], {"id": 7}, [None]])
def test_end_tokens_that_are_none(given: object) -> None:
    refused("eos_token_id=.* must be an integer from 0 to 31", eos_token_id=given)


def test_end_tokens_of_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_dict(eos_token_id=3)))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (3,)
    generation = tmp_path / "generation_config.json"
    for content, want in [
        ({"eos_token_id": [30, 7]}, (30, 7)),
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, (3,)),
        ({"temperature": 0.6}, (3,)),
    ]:
        generation.write_text(json.dumps(content))
        assert ModelConfig.from_folder(tmp_path).eos_token_ids == want
    generation.write_text('{"eos_token_id": [30, 99]}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=99"):
        ModelConfig.from_folder(tmp_path)


# ---- files


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'nowhere' is no folder"):
        ModelConfig.from_folder("nowhere")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json cannot be read: Is a directory"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        ModelConfig.from_folder(Path(__file__))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is no valid JSON"),
        (b"{", "is no valid JSON"),
        (b"\xff\xfe{}", "is no valid JSON"),
        (b"\x00" * 64, "is no valid JSON"),
        (b"[" * 100_000, "is no valid JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "is no valid JSON"),
        (b"[]", "must hold a JSON object, not a list"),
        (b'"text"', "must hold a JSON object, not a str"),
        (b"null", "must hold a JSON object, not a NoneType"),
        (b"{}" + b" " * MAX_CONFIG_BYTES, "1048576"),
    ],
    ids=lambda value: repr(value[:16]),
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_config(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_dict()))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as caught:
        ModelConfig.from_folder(tmp_path)
    assert name in str(caught.value)


def test_the_largest_file_that_is_read(tmp_path: Path) -> None:
    text = json.dumps(config_dict())
    (tmp_path / "config.json").write_text(text + " " * (MAX_CONFIG_BYTES - len(text)))
    assert ModelConfig.from_folder(tmp_path) == read()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_file_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Its size reads 0, so only a bounded read keeps it from filling the memory."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from minilora.config import ModelConfig\n"
        "ModelConfig.from_folder(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "CheckpointError" in done.stderr.splitlines()[-1]


def test_read_json_object_takes_another_limit(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    assert read_json_object(file, 8) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"x.json has .*7"):
        read_json_object(file, 7)
