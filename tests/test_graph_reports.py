"""Faults that people met with LoRA under graphs, tried on every backend of this machine.

Each test names its report; what was wrong and what is right is in tests/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import GraphMode
from minilora.config.engine import EngineConfig
from minilora.config.errors import ConfigError
from minilora.engine import startup
from minilora.engine.make_runner import graph_kind
from tests.conftest import SignatureZoo

BACKENDS = ["recorded", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=BACKENDS)
def graph(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(model: Path | str, graph: str, **options: Any) -> LLM:
    defaults = {
        "device": "cuda" if graph == "cuda" else "cpu",
        "dtype": "float32",
        "num_kv_blocks": 200,
        "max_num_batched_tokens": 128,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    return LLM(model, graph=graph, **{**defaults, **options})


def eager(model: Path | str, graph: str, **options: Any) -> LLM:
    return make(model, "none", **{"device": "cuda" if graph == "cuda" else "cpu", **options})


def answers(llm: LLM, prompts: list[list[int]], loras: Any = None, tokens: int = 8) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, loras, progress=False)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("rows", range(1, 18))
def test_g2_padding_rows_touch_no_live_kv(tiny_llama: Path, graph: str, rows: int) -> None:
    """nano-vllm 89; vLLM 43810, 21196: the first sequence, or the last block's, went wrong."""
    prompts = [[7, 8, 9]] * rows
    blocks = 2 * rows  # 3 + 20 tokens in blocks of 16: the pool is full, its last block in use
    options = {"num_kv_blocks": max(2, blocks), "max_num_seqs": 17, "max_model_len": 32}
    graphs = answers(make(tiny_llama, graph, **options), prompts, tokens=20)
    assert graphs == [graphs[0]] * rows
    assert graphs == answers(eager(tiny_llama, graph, **options), prompts, tokens=20)


def test_g2_five_equal_prompts(tiny_llama: Path, graph: str) -> None:
    options = {"capture_sizes": [1, 2, 4, 8]}
    prompts = [[7, 8, 9]] * 5
    graphs = answers(make(tiny_llama, graph, **options), prompts, tokens=64)
    assert graphs == [graphs[0]] * 5
    assert graphs == answers(eager(tiny_llama, graph), prompts, tokens=64)


def test_g4_an_adapter_loaded_after_capture(zoo: SignatureZoo, graph: str) -> None:
    """TGI 2180, vLLM 15090: LoRA kernels were never recorded."""
    llm = make(zoo.model, graph, enable_lora=True, max_loras=2, max_model_len=64)
    assert answers(llm, [[4]]) == [[5, 6, 7, 8, 9, 10, 11, 12]]
    adapter = LoRARequest("late", zoo("down-7"))
    assert answers(llm, [[4], [4]], [adapter, None]) == [[7] * 8, [5, 6, 7, 8, 9, 10, 11, 12]]
    assert llm.runner.num_steps[GraphMode.NONE] == 0


def test_g6_every_element_that_a_graph_reads_is_set(zoo: SignatureZoo, graph: str) -> None:
    """SGLang 14177: offsets were uninitialised memory."""
    device = "cuda" if graph == "cuda" else "cpu"
    for size in (1, 2, 4):
        pollution = [torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=device) for _ in "1234"]
        del pollution
        llm = make(
            zoo.model, graph, enable_lora=True, capture_sizes=[size], num_kv_blocks=16,
            max_num_batched_tokens=8, max_model_len=32,
        )  # fmt: skip
        assert answers(llm, [[4]], LoRARequest("a", zoo("down-7"))) == [[7] * 8]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 9, 12, 17, 20])
def test_g7_the_full_batch_has_a_graph(tiny_llama: Path, graph: str, most: int) -> None:
    """nano-vllm 216, vllm-ascend 16049, vLLM 25829: no size for max_num_seqs, or one above it."""
    prompts = [[salt, 3, salt + 1] for salt in range(10, 10 + most)]
    llm = make(tiny_llama, graph, max_num_seqs=most)
    full = answers(llm, prompts)
    assert full == [answers(llm, [prompt])[0] for prompt in prompts]
    sizes = {k.descriptor.num_tokens for k in llm.runner.graphs if k.mode is GraphMode.FULL}
    assert max(sizes) == most
    assert llm.runner.num_steps[GraphMode.NONE] == 0


@pytest.mark.parametrize(("seqs", "length"), [(1, 31), (2, 14), (1, 300)])
def test_g7_the_longest_prefill_has_a_graph(
    tiny_llama: Path, graph: str, seqs: int, length: int
) -> None:
    """No step has more than max_num_seqs x max_model_len tokens, and that many has a graph."""
    llm = make(
        tiny_llama, graph, max_num_seqs=seqs, max_model_len=length, max_num_batched_tokens=512
    )
    answers(llm, [[5] * (length - 1)] * seqs, tokens=1)
    assert llm.runner.num_steps[GraphMode.NONE] == 0


def test_g7_sizes_that_leave_the_full_batch_out_are_told(
    tiny_llama: Path, graph: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(tiny_llama, graph, capture_sizes=[1, 2], max_num_seqs=4, graph_mode="full")
    assert "decode steps of max_num_seqs=4 rows run without a graph; add 4" in caplog.text


def test_g8_a_size_above_the_buffers(tiny_llama: Path, graph: str) -> None:
    """vLLM 15308, 25282: 50 rows of metadata, 56 captured."""
    prompts = [[salt, 3] for salt in range(50)]
    options = {"max_num_seqs": 50, "max_model_len": 64, "num_kv_blocks": 220}
    llm = make(tiny_llama, graph, capture_sizes=[8, 56], **options)
    assert answers(llm, prompts) == answers(eager(tiny_llama, graph, **options), prompts)
    with pytest.raises(ConfigError, match=r"capture_sizes.*56.*50"):
        make(tiny_llama, graph, capture_sizes=[8, 56], graph_mode="full", **options)


def test_g9_a_long_answer(tiny_llama: Path, tiny_adapter: Callable[..., Path], graph: str) -> None:
    """SGLang 26930: good first, garbage after about 100 tokens, with graphs only."""
    folder = tiny_adapter("g9", target_modules=["q_proj", "v_proj", "down_proj"], r=4)
    options = {"enable_lora": True, "max_model_len": 512, "num_kv_blocks": 120}
    prompts, loras = [[5, 6, 7], [9] * 17], [LoRARequest("g9", folder), None]
    graphs = answers(make(tiny_llama, graph, **options), prompts, loras, tokens=400)
    assert graphs == answers(eager(tiny_llama, graph, **options), prompts, loras, tokens=400)


def test_p3_counts_that_cannot_occur_are_not_captured(zoo: SignatureZoo, graph: str) -> None:
    """vLLM 36370: 94 s to 29 s by skipping counts above max_num_seqs."""
    llm = make(zoo.model, graph, enable_lora=True, max_loras=8, max_num_seqs=1, max_model_len=64)
    counts = {key.descriptor.num_active_loras for key in llm.runner.graphs}
    assert counts == {0, 1}
    report = llm.capture_report
    assert report.graphs == len(llm.runner.graphs)
    assert report.seconds > 0
    assert report.pool_memory > 0


def test_p5_an_adapter_is_read_once(zoo: SignatureZoo, graph: str, monkeypatch: Any) -> None:
    """vLLM 5564, SkyRL 1606: a flag on the request had the disk read at every step."""
    reads: list[str] = []
    plain = startup.load_adapter

    def counted(name: str, *args: Any, **options: Any) -> Any:
        reads.append(name)
        return plain(name, *args, **options)

    monkeypatch.setattr(startup, "load_adapter", counted)
    llm = make(zoo.model, graph, enable_lora=True, max_loras=1)
    loras = [LoRARequest(name, zoo(name)) for name in ("down-7", "down-9")]
    for _ in range(2):  # one slot: each is swapped out and in again
        assert answers(llm, [[4], [4]], loras, tokens=50) == [[7] * 50, [9] * 50]
    assert sorted(reads) == ["down-7", "down-9"]
    assert llm.scheduler.slots is not None
    assert llm.scheduler.slots.num_swaps > 2


def test_cuda_graphs_without_cuda_name_the_recorder(zoo: SignatureZoo) -> None:
    with pytest.raises(ConfigError, match=r"graph='cuda'.*graph='recorded'"):
        LLM(zoo.model, graph="cuda", device="cpu")


def test_cuda_graphs_with_adapters_need_triton(monkeypatch: Any) -> None:
    """Plain LoRA ops read the routing on the host, which no capture allows."""
    monkeypatch.setattr("minilora.engine.make_runner.HAS_TRITON", False)
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"Triton is not installed.*graph='none'"):
        graph_kind(EngineConfig("m", enable_lora=True), cuda)
    assert graph_kind(EngineConfig("m"), cuda) == "cuda"
    assert graph_kind(EngineConfig("m", enable_lora=True, graph="none"), cuda) == "none"
