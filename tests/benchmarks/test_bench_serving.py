"""pytest-benchmark cases of a whole engine: the shapes of vLLM #25914 and #32005, scaled down.

    pytest tests/benchmarks/test_bench_serving.py --benchmark-only

On a CPU a small shape, on CUDA the 7B shape with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM
from minilora.bench.latency import batch
from minilora.bench.serve import serve
from minilora.bench.setup import Setup, make_setup
from minilora.testing.shapes import make_shape

CUDA = torch.cuda.is_available()
ADAPTERS = 4
LENGTHS = {"input_len": 32, "output_len": 128} if CUDA else {"input_len": 8, "output_len": 16}
OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 128, "max_model_len": 256}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder: Path = tmp_path_factory.mktemp("bench")
    changes = {} if CUDA else {"num_hidden_layers": 4}
    model = make_shape(folder / "m", "llama-2-7b" if CUDA else "smollm2", **changes)
    made = make_setup(folder, shape=None, model=str(model), adapters=ADAPTERS, rank=16)
    return Setup(made.model, "dummy", made.loras, made.rank)


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request: pytest.FixtureRequest, setup: Setup) -> Iterator[tuple[str, LLM]]:
    return request.param, setup.llm(enable_lora=request.param == "on", **OPTIONS)


@pytest.mark.parametrize("adapters", [0, 1, 4])
def test_latency(benchmark: Any, engine: tuple[str, LLM], setup: Setup, adapters: int) -> None:
    """Batch of 8, fixed lengths; "on" with 0 adapters is LoRA idle."""
    lora, llm = engine
    if lora == "off" and adapters:
        pytest.skip("an engine without LoRA has no adapters")
    benchmark.pedantic(batch(llm, setup.loras[:adapters], 8, **LENGTHS), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_serve(benchmark: Any, engine: tuple[str, LLM], setup: Setup, concurrency: int) -> None:
    """Requests in flight, adapters drawn with Zipf weights."""
    lora, llm = engine
    loras = setup.loras if lora == "on" else ()
    benchmark.pedantic(
        lambda: serve(llm, loras, concurrency, 8, **LENGTHS), rounds=2, warmup_rounds=1
    )
