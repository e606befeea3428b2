"""The signature model and its adapters: the token alone says who answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from minilora import ConfigError
from minilora.config import ModelConfig
from minilora.testing import make_signature_adapter, make_signature_llama
from tests.reference import PeftReference, with_cache

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
FILE = "adapter_model.safetensors"
SIGNATURES = [("down", token) for token in range(32)] + [("v", token) for token in range(1, 17)]
Signature = Callable[[str, int], Path]


def load_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def signature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Signature]:
    root = tmp_path_factory.mktemp("signature")
    model = make_signature_llama(root / "model")

    def adapter(kind: str, token: int) -> Path:
        folder = root / f"{kind}-{token}"
        make_signature_adapter(folder, model, kind=kind, token=token, r=1 + token % 4)
        return folder

    return model, adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signatures_in_transformers_and_peft(
    signature: tuple[Path, Signature], dtype: torch.dtype
) -> None:
    folder, adapter = signature
    model = PeftReference(folder, dtype)
    tokens = [(7 * i) % 32 for i in range(90)]
    rows = model.logits(tokens)
    assert rows.argmax(-1).tolist() == [(token + 1) % 32 for token in tokens]
    assert margin(rows) > 0.9
    some = SIGNATURES if dtype == torch.float32 else SIGNATURES[::5]
    for kind, token in some:
        rows = model.logits(tokens, adapter(kind, token))
        assert set(rows.argmax(-1).tolist()) == {token}
        assert margin(rows) > 0.9
    assert model.greedy([3], 40, adapter("v", 5)) == [5] * 40


def margin(rows: torch.Tensor) -> float:
    """By how much of its height the best logit beats the second, in the worst row."""
    best, second = rows.float().topk(2).values.T
    return float(((best - second) / best).min())


@pytest.mark.parametrize(("stamped", "answer"), [(60, 2), (20, 7)])
def test_v_stamps_the_kv_cache(
    signature: tuple[Path, Signature], stamped: int, answer: int
) -> None:
    """A majority of a context of 80 tokens that another adapter wrote decides the answer."""
    folder, adapter = signature
    base, cache = load_base(folder), transformers.DynamicCache()
    model = peft.PeftModel.from_pretrained(base, adapter("v", 2), "v-2")
    model.load_adapter(adapter("v", 7), "v-7")
    for name, count in (("v-2", stamped), ("v-7", 80 - stamped)):
        model.set_adapter(name)
        rows = model(torch.full((1, count), 11), **with_cache(base, cache)).logits
    assert int(rows[0, -1].argmax()) == answer


def test_a_stamped_cache_shows_under_the_base(signature: tuple[Path, Signature]) -> None:
    folder, adapter = signature
    base, cache = load_base(folder), transformers.DynamicCache()
    model = peft.PeftModel.from_pretrained(base, adapter("v", 2))
    model(torch.full((1, 50), 11), **with_cache(base, cache))
    with model.disable_adapter():
        rows = model(torch.full((1, 30), 11), **with_cache(base, cache)).logits
    assert int(rows[0, -1].argmax()) == 2


def test_signatures_with_more_layers_ends_and_no_scale(tmp_path: Path) -> None:
    model = make_signature_llama(
        tmp_path / "model", num_hidden_layers=12, eos_token_id=[30, 7], dtype="bfloat16"
    )
    options: dict[str, Any] = {"token": 9, "dtype": "bfloat16"}
    down = make_signature_adapter(tmp_path / "down", model, **options)
    v = make_signature_adapter(tmp_path / "v", model, kind="v", r=16, **options)
    off = make_signature_adapter(tmp_path / "off", model, lora_alpha=0, **options)
    assert ModelConfig.from_folder(model).eos_token_ids == (30, 7)
    reference = PeftReference(model, torch.bfloat16)
    assert reference.greedy([4], 8, down) == reference.greedy([4], 8, v) == [9] * 8
    assert reference.greedy([4], 8, off) == reference.greedy([4], 8) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert len(load_file(down / FILE)) == 24


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("kind", ["down", "v"])
def test_every_rank_carries_an_equal_part_of_the_strength(
    tmp_path: Path, signature: tuple[Path, Signature], kind: str, rank: int
) -> None:
    make_signature_adapter(tmp_path, signature[0], kind=kind, token=3, r=rank)
    for name, b in load_file(tmp_path / FILE).items():
        if "lora_B" in name:
            parts = b[b.abs().sum(1) > 0]
            assert parts.tolist() == [[30 / rank] * rank]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "up", "token": 1}, "kind='up'"),
        ({"kind": "v", "token": 17}, "token=17 must be an integer from 1 to 16"),
        ({"kind": "down", "token": 32}, "token=32"),
        ({"token": 1, "r": 0}, "r=0"),
        ({"token": 1, "dtype": "bf16"}, "dtype='bf16'"),
    ],
)
def test_signatures_that_do_not_exist(
    tmp_path: Path, signature: tuple[Path, Signature], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_signature_adapter(tmp_path, signature[0], **options)
