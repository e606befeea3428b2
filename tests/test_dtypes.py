"""Half precision and float32 on every device, against the oracle by the one tolerance table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minilora import LoRARequest, SamplingParams
from minilora.testing import Oracle, make_tiny_adapter, make_tiny_llama
from minilora.testing.tolerances import assert_close
from tests.test_parity import ADAPTERS, LogitsLLM, prompt

NAMES = ["all-layers", "everything", "rank-3", "rank-33", "rslora"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_equal_the_oracle(tmp_path: Path, device: str, dtype: str) -> None:
    model = make_tiny_llama(tmp_path / "model", dtype=dtype)
    folders: list[Path | None] = [None]
    for name in NAMES:
        make_tiny_adapter(tmp_path / name, model, dtype=dtype, **ADAPTERS[name])
        folders.append(tmp_path / name)
    llm = LogitsLLM(
        model, enable_lora=True, max_lora_rank=64, num_kv_blocks=200, dtype=dtype, device=device
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    loras = [folder and LoRARequest(folder.name, folder) for folder in folders]
    outputs = llm.generate([prompt(9 + 7 * i, i) for i in range(len(folders))], params, loras)
    oracle = Oracle(model)
    for output, folder in zip(outputs, folders, strict=True):
        sequence = [*output.prompt_token_ids, *output.token_ids[:-1]]
        want = oracle.logits(sequence, adapter=folder)[-24:]
        got = torch.stack(llm.kept[output.request_id]).cpu()
        assert_close(got, want, getattr(torch, dtype), what=f"{output.adapter} in {dtype}")


def test_an_adapter_of_another_dtype_is_cast_once(tmp_path: Path, device: str) -> None:
    """Field report K5: float32 adapters with a bfloat16 model, and the other way round."""
    for of_model, of_adapter in (("bfloat16", "float32"), ("float32", "bfloat16")):
        folder = tmp_path / of_model
        model = make_tiny_llama(folder / "model", dtype=of_model)
        adapter = make_tiny_adapter(folder / "adapter", model, dtype=of_adapter)
        llm = LogitsLLM(model, enable_lora=True, num_kv_blocks=64, dtype=of_model, device=device)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        output = llm.generate([prompt(9, 1)], params, LoRARequest("a", adapter))[0]
        sequence = [*output.prompt_token_ids, *output.token_ids[:-1]]
        want = Oracle(model).logits(sequence, adapter=adapter)[-8:]
        got = torch.stack(llm.kept[output.request_id]).cpu()
        assert_close(got, want, getattr(torch, of_model), what=f"{of_adapter} in {of_model}")
