"""Adapters that load: the same A, B and scaling as PEFT has, whatever the config says."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from minilora.lora.adapter import Adapter
from minilora.lora.peft_config import AdapterConfig
from tests.adapter_folders import EMBEDDING, HEAD, MODEL, PREFIX, Q, V, keys, load, lora, write

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": LAYERS},
    "rslora": {"target_modules": LAYERS, "r": 16, "lora_alpha": 16, "use_rslora": True},
    "alpha_zero": {"target_modules": ["q_proj"], "lora_alpha": 0},
    "alpha_fraction": {"target_modules": ["q_proj"], "lora_alpha": 2.5},
    "alpha_negative": {"target_modules": ["q_proj"], "lora_alpha": -8},
    "rank_pattern": {
        "target_modules": LAYERS,
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.(up|down)_proj": 16, "^model.*o_proj": 2},
    },
    "alpha_pattern_order": {  # saved sorted: another key is the first that fits then, as in PEFT
        "target_modules": LAYERS,
        "alpha_pattern": {"v_proj": 3, "1.self_attn.v_proj": 5},
    },
    "alpha_pattern": {
        "target_modules": LAYERS,
        "alpha_pattern": {"model.layers.0.mlp.up_proj": 40, ".*k_proj": 0.5},
    },
    "patterns_rslora": {
        "target_modules": LAYERS,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 4},
        "alpha_pattern": {"down_proj": 3, "proj": 99},
    },
    "one_layer": {"target_modules": LAYERS, "layers_to_transform": 1},
    "layers_pattern": {
        "target_modules": LAYERS,
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "full_name_despite_layers": {
        "target_modules": ["model.layers.1.mlp.up_proj", "q_proj"],
        "layers_to_transform": [0],
    },
    "excluding_names": {
        "target_modules": LAYERS,
        "exclude_modules": ["up_proj", "0.mlp.gate_proj"],
    },
    "excluding_regex": {"target_modules": LAYERS, "exclude_modules": r".*\.0\.self_attn.*"},
    "regex": {"target_modules": r".*\.(q_proj|down_proj)"},
    "regex_lookahead": {"target_modules": r"^(?!.*layers\.0\.).*(q_proj|v_proj)$"},
    "all_linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "everything": {"target_modules": [*LAYERS, "embed_tokens", "lm_head"]},
    "everything_regex": {"target_modules": ".*(_proj|embed_tokens|lm_head)"},
    **{
        f"init_{init}": {"target_modules": ["q_proj"], "init_lora_weights": init}
        for init in (False, "gaussian", "orthogonal", "eva", "mica")
    },
}


@pytest.fixture(scope="module")
def base_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.intermediate_size,
        num_hidden_layers=MODEL.num_hidden_layers,
        num_attention_heads=MODEL.num_attention_heads,
        num_key_value_heads=MODEL.num_key_value_heads,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).requires_grad_(False)


@pytest.fixture(scope="module")
def base_weight(base_model: Any) -> Callable[[str], torch.Tensor]:
    weights = {EMBEDDING: base_model.model.embed_tokens.weight, HEAD: base_model.lm_head.weight}
    return weights.__getitem__


def save_with_peft(base_model: Any, folder: Path, **options: Any) -> None:
    """Let PEFT make and save an adapter with A and B random (its own B is zero)."""
    generator = torch.Generator().manual_seed(1)
    save_options = {"safe_serialization": options.pop("safe_serialization", True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(copy.deepcopy(base_model), config)
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.data = torch.randn(tensor.shape, generator=generator)
        model.save_pretrained(folder, **save_options)


def layers_in_peft(base_model: Any, folder: Path) -> dict[str, LoraLayer]:
    """Let PEFT load an adapter; return its layers by module name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base_model), folder)
    return {
        name.removeprefix(PREFIX): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


@torch.no_grad()
def assert_as_in_peft(adapter: Adapter, layers: dict[str, LoraLayer]) -> None:
    assert set(adapter.modules) == set(layers)
    for name, weights in adapter.modules.items():
        layer: Any = layers[name]
        assert weights.r == layer.r["default"] == weights.a.shape[0] == weights.b.shape[1]
        assert weights.lora_alpha == layer.lora_alpha["default"]
        assert weights.scaling == layer.scaling["default"]
        delta = weights.scaling * (weights.b @ weights.a)
        theirs = layer.get_delta_weight("default")
        torch.testing.assert_close(delta.T if name == EMBEDDING else delta, theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_as_in_peft(name: str, base_model: Any, base_weight: Any, tmp_path: Path) -> None:
    save_with_peft(base_model, tmp_path, **CONFIGS[name])
    adapter = load(tmp_path, base_weight=base_weight)
    assert_as_in_peft(adapter, layers_in_peft(base_model, tmp_path))


def test_bin_as_in_peft(base_model: Any, base_weight: Any, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "safe_serialization": False}
    save_with_peft(base_model, tmp_path, **options)
    assert (tmp_path / "adapter_model.bin").exists()
    adapter = load(tmp_path, base_weight=base_weight)
    assert_as_in_peft(adapter, layers_in_peft(base_model, tmp_path))


def test_a_tied_head_as_in_peft(base_model: Any, tmp_path: Path) -> None:
    """LoRA on a tied head, on a tied embedding, and on both: each stays where it was put."""
    config = copy.deepcopy(base_model.config)
    config.tie_word_embeddings = True
    tied = transformers.LlamaForCausalLM(config).requires_grad_(False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    for targets in (["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]):
        folder = tmp_path / "-".join(targets)
        save_with_peft(tied, folder, target_modules=targets)
        adapter = load(folder, base_weight=lambda name: tied.lm_head.weight)
        assert_as_in_peft(adapter, layers_in_peft(tied, folder))


TARGETS = [
    ["q_proj"], ["proj"], ["self_attn.v_proj", "lm_head"], ["embed_tokens", "1.mlp.up_proj"], [],
    [f"model.layers.{i}.mlp.down_proj" for i in range(2)], ["o_proj", V], ["layers.0.mlp"],
    ".*", "q_proj", r".*\.q_proj", r"model\.layers\.[\d]{1,}\.mlp\.(?:up|gate)_proj",
    ".*_proj|lm_head",
    r"(?:.*?(?:language|layers).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|(?:\blm_head)",
]  # fmt: skip
PATTERNS = [
    "q_proj", "proj", ".*proj", "^model.layers.0.self_attn.q_proj", "model.layers.1.*", "lm_head",
    r"layers\.\d+\.mlp\.(up|down)_proj", "self_attn.(q|k)_proj", "embed_tokens", "attn.q_proj",
    "0.self_attn.[qv]_proj", ".*", "^layers.0.mlp.up_proj", "up_proj|down_proj", "tokens$",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_matching_is_pefts(data: st.DataObject) -> None:
    """Every rule, for every module of the model, against PEFT's own functions."""
    targets = data.draw(st.sampled_from(TARGETS), label="target_modules")
    fields: dict[str, Any] = {
        "target_modules": targets,
        "exclude_modules": data.draw(st.sampled_from([None, [], "", *TARGETS]), label="exclude"),
    }
    if isinstance(targets, list):
        layers = st.sampled_from([None, 0, 1, [], [0], [1, 7]])
        fields["layers_to_transform"] = data.draw(layers, label="layers")
    if isinstance(fields.get("layers_to_transform"), (int, list)):
        patterns = st.sampled_from(
            [None, "layers", ["h", "layers"], "h", ".*", "yers", r"mod\w+.layers"]
        )
        fields["layers_pattern"] = data.draw(patterns, label="layers_pattern")
    if fields.get("layers_to_transform") == []:
        fields["layers_pattern"] = None  # minilora refuses it then; PEFT passes over it
    ranks = data.draw(st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64)), label="ranks")
    ours = AdapterConfig.from_dict(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": ranks, **fields}
    )
    theirs = peft.LoraConfig(r=8, **fields)
    for module in MODEL.lora_modules():
        assert ours.targets(module) == bool(check_target_module_exists(theirs, module)), module
        assert ours.rank_of(module) == ranks.get(get_pattern_key(ranks.keys(), module), 8), module


def test_l1_rslora_divides_by_the_root_of_r(tmp_path: Path) -> None:
    tensors = lora(Q, r=16)
    plain = load(write(tmp_path / "a", tensors, r=16, lora_alpha=16))
    rslora = load(write(tmp_path / "b", tensors, r=16, lora_alpha=16, use_rslora=True))
    assert (plain.modules[Q].scaling, rslora.modules[Q].scaling) == (1.0, 4.0)
    assert torch.equal(plain.modules[Q].b, rslora.modules[Q].b), "nothing is folded into B"


def test_l8_alpha_zero_is_scale_zero(tmp_path: Path) -> None:
    assert load(write(tmp_path, lora_alpha=0)).modules[Q].scaling == 0.0


def test_l10_the_tensors_decide_whatever_target_modules_is(tmp_path: Path) -> None:
    forms = [
        ["q_proj", "v_proj"],
        "all-linear",
        "ALL-LINEAR",
        rf"({Q}|{V})",
        r".*\.(q|v)_proj",
        None,
    ]
    adapters = [load(write(tmp_path / str(i), target_modules=f)) for i, f in enumerate(forms)]
    assert {frozenset(adapter.modules) for adapter in adapters} == {frozenset({Q, V})}
    assert len({adapter.digest for adapter in adapters}) == 1


def test_targets_without_tensors_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minilora"):
        load(write(tmp_path, target_modules=[Q, V]))
        load(write(tmp_path, target_modules=None))
        assert not caplog.records
        load(write(tmp_path, target_modules=[Q, V, "o_proj"]))
    assert "'sql'" in caplog.text
    assert "'model.layers.0.self_attn.o_proj'" in caplog.text


def test_l11_safetensors_are_preferred(tmp_path: Path) -> None:
    write(tmp_path, lora(V), file_format="bin")
    assert set(load(tmp_path).modules) == {V}
    write(tmp_path, lora(Q))
    assert set(load(tmp_path).modules) == {Q}


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept_or_cast_once(
    tmp_path: Path, file_format: str, stored: torch.dtype
) -> None:
    tensors = lora(Q, EMBEDDING, dtype=stored)
    write(tmp_path, tensors, file_format)
    for dtype in (None, torch.float32, torch.bfloat16):
        adapter = load(tmp_path, dtype=dtype)
        for module in (Q, EMBEDDING):
            halves = adapter.modules[module].a, adapter.modules[module].b
            for got, key in zip(halves, keys(module), strict=True):
                assert got.dtype == (dtype or stored)
                assert torch.equal(got, tensors[key].to(got.dtype))
                assert got.is_contiguous()


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_weights_outlive_the_file(tmp_path: Path, file_format: str) -> None:
    """No tensor may stay a view of the mapped file: that changes or ends with the file."""
    adapter = load(write(tmp_path, file_format=file_format))
    before = adapter.modules[Q].a.clone()
    file = tmp_path / f"adapter_model.{file_format}"
    with file.open("r+b") as content:
        content.write(b"\xff" * file.stat().st_size)
    assert torch.equal(adapter.modules[Q].a, before)


def test_transposed_views_in_a_bin(tmp_path: Path) -> None:
    tensors = lora(Q)
    turned = {key: tensor.T.contiguous().T for key, tensor in tensors.items()}
    adapter = load(write(tmp_path, turned, "bin"))
    assert torch.equal(adapter.modules[Q].a, tensors[keys(Q)[0]])
    assert adapter.digest == load(write(tmp_path / "b", tensors)).digest


def test_names_without_pefts_prefix(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "a"))
    short = {key.removeprefix(PREFIX): tensor for key, tensor in lora(Q, V).items()}
    assert load(write(tmp_path / "b", short)).digest == plain.digest


def test_adapter_name_inside_the_keys(tmp_path: Path) -> None:
    tensors = lora(Q, EMBEDDING)
    infixed = {}
    for key, tensor in tensors.items():
        linear = key.endswith(".weight")
        infixed[f"{key.removesuffix('.weight')}.default{'.weight' * linear}"] = tensor
    expected = load(write(tmp_path / "a", tensors)).digest
    assert load(write(tmp_path / "b", infixed, "bin")).digest == expected


def test_sizes(tmp_path: Path) -> None:
    tensors = lora(Q) | lora(V, r=3)
    adapter = load(write(tmp_path, tensors, rank_pattern={"v_proj": 3}))
    assert (adapter.name, adapter.path, adapter.max_rank) == ("sql", str(tmp_path), 8)
    assert adapter.num_bytes == 4 * (8 * (32 + 32) + 3 * (32 + 16))


def test_digest_follows_what_is_computed(tmp_path: Path) -> None:
    plain = load(write(tmp_path)).digest
    assert load(write(tmp_path)).digest == plain
    assert load(write(tmp_path / "bin", file_format="bin")).digest == plain
    others = {plain}
    for change in ({"lora_alpha": 8}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 1}}):
        others.add(load(write(tmp_path, **change)).digest)
    one_value, one_sign = lora(Q, V), lora(Q, V)
    one_value[keys(V)[1]][5, 3] += 1e-4
    one_sign[keys(Q)[0]][0, 0] *= -1
    others |= {load(write(tmp_path, tensors)).digest for tensors in (one_value, one_sign)}
    assert len(others) == 6


def test_a_base_copy_in_another_dtype_is_equal(base_weight: Any, tmp_path: Path) -> None:
    """Served in bfloat16 with a copy in float32, and the other way round."""
    head = base_weight(HEAD)
    for stored, served in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        tensors = lora(HEAD) | {f"{PREFIX}{HEAD}.base_layer.weight": head.detach().to(stored)}
        served_weight = head.to(served)
        adapter = load(write(tmp_path, tensors), base_weight=lambda name, w=served_weight: w)
        assert set(adapter.modules) == {HEAD}


def test_a_large_base_copy_is_compared_in_pieces(
    base_weight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minilora.lora.adapter_files._PIECE_BYTES", 5 * 8 * MODEL.hidden_size)
    key = f"{PREFIX}{HEAD}.base_layer.weight"
    copied = base_weight(HEAD).detach().clone()
    for file_format in ("safetensors", "bin"):
        write(tmp_path / file_format, lora(HEAD) | {key: copied}, file_format)
        load(tmp_path / file_format, base_weight=base_weight)
        copied[-1, -1] += 1  # in the last, shorter piece
        write(tmp_path / file_format, lora(HEAD) | {key: copied}, file_format)
        with pytest.raises(ValueError, match="differs"):
            load(tmp_path / file_format, base_weight=base_weight)
        copied[-1, -1] = base_weight(HEAD)[-1, -1]


def test_only_as_much_as_math_allows(tmp_path: Path) -> None:
    """Alpha over the root of r, for a rank that has no exact root."""
    adapter = load(write(tmp_path, lora(Q, r=7), r=7, lora_alpha=3, use_rslora=True))
    assert adapter.modules[Q].scaling == 3 / math.sqrt(7)
