"""Every path a step can take, bit for bit against eager execution and within the table against
the oracle; and the harness's own promises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import NO_LORA, Batch, BatchRow, GraphMode
from minilora.config.errors import ConfigError
from minilora.model.fused import num_compilations
from minilora.runner import ModelRunner
from minilora.testing import make_tiny_llama
from minilora.testing.parity import PATHS, available_paths, run_parity
from minilora.testing.poison import POISON, poisoned
from minilora.testing.traffic import TRAFFIC
from minilora.warmup import WarmUp
from tests.conftest import SignatureZoo

QUICK = ["none", "base_mixed", "counts", "shuffle"]
SLOW = [name for name in TRAFFIC if name not in QUICK]
GRAPH_PATHS = [name for name in available_paths() if name != "eager"]


class Tiny:
    """A tiny Llama and adapters of several ranks and targets."""

    def __init__(self, model: Path, tiny_adapter: Callable[..., Path]) -> None:
        kinds: dict[str, dict[str, Any]] = {
            "every-module": {"r": 5, "target_modules": "all-linear"},
            "attention": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
            "embeddings": {"r": 8, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        }
        self.model = model
        self.adapters = {
            name: str(tiny_adapter(f"paths-{name}", seed=seed, **options))
            for seed, (name, options) in enumerate(kinds.items())
        }

    def factory(self, **changes: Any) -> Callable[..., LLM]:
        def make(**path: str) -> LLM:
            options: dict[str, Any] = {
                "enable_lora": True,
                "max_loras": 2,
                "max_num_seqs": 9,
                "num_kv_blocks": 60,
                "max_num_batched_tokens": 48,
                "max_model_len": 128,
                "dtype": "float32",
                "device": "cuda" if path["graph"] == "cuda" else "cpu",
            }
            return LLM(self.model, **{**options, **changes, **path})

        return make


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path, tiny_adapter: Callable[..., Path]) -> Tiny:
    return Tiny(tiny_llama, tiny_adapter)


def check(make: Callable[..., LLM], path: str, workloads: list[str], adapters: Any) -> None:
    report = run_parity(make, [path], workloads, adapters=adapters)
    report.assert_ok()
    assert all(row.eager_error == 0.0 for row in report.rows)
    if path != "eager":
        assert all(row.replays > 0 for row in report.rows)


@pytest.mark.parametrize("path", available_paths())
def test_parity(tiny: Tiny, path: str) -> None:
    check(tiny.factory(), path, QUICK, tiny.adapters)


@pytest.mark.slow
@pytest.mark.parametrize("workload", SLOW)
@pytest.mark.parametrize("path", available_paths())
def test_parity_of_every_workload(tiny: Tiny, path: str, workload: str) -> None:
    check(tiny.factory(), path, [workload], tiny.adapters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"specialize_lora": False},
        {"specialize_active_lora": False},
        {"specialize_lora": False, "specialize_active_lora": False},
        {"capture_sizes": [3, 7]},
        {"max_loras": 3, "block_size": 5, "num_kv_blocks": 90},
        {"max_num_seqs": 1, "max_model_len": 40},
        {"max_num_seqs": 4, "max_num_batched_tokens": 4},
        {"num_kv_blocks": 8, "max_model_len": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [name for name in GRAPH_PATHS if "both" in name])
def test_parity_of_other_options(tiny: Tiny, path: str, changes: dict[str, Any]) -> None:
    check(tiny.factory(**changes), path, ["base_mixed", "shuffle", "staggered"], tiny.adapters)


@pytest.mark.parametrize("path", GRAPH_PATHS)
def test_parity_without_lora(tiny: Tiny, path: str) -> None:
    make = tiny.factory(enable_lora=False)
    check(make, path, ["none", "long"], {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("path", [name for name in PATHS if "CUDA" in name])
def test_parity_of_compiled_graphs(tiny: Tiny, path: str) -> None:
    """As users run it: compile="auto" is "inductor" on CUDA."""
    before = num_compilations()
    make = tiny.factory(compile="inductor")
    llm = make(**PATHS[path])
    assert num_compilations() > before
    compiled = num_compilations()
    report = run_parity(llm, workloads=[*QUICK, "long"], adapters=tiny.adapters)
    report.assert_ok()
    assert num_compilations() == compiled, "none while serving"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_parity_of_dtypes_on_cuda(tiny: Tiny, dtype: str) -> None:
    check(tiny.factory(dtype=dtype), "CUDA both", [*QUICK, "long"], tiny.adapters)


@pytest.mark.parametrize("path", ["eager", *GRAPH_PATHS])
def test_autocast_of_the_caller_changes_nothing(tiny: Tiny, path: str) -> None:
    """It would round what runs eagerly, gaps too, and not what a graph has frozen."""
    runner = tiny.factory()(**PATHS[path]).runner
    prompt = Batch((BatchRow([4, 5, 6], 0, [1], NO_LORA, True),))
    decode = Batch((BatchRow([7], 3, [1], NO_LORA, True),))
    want = [runner.execute(batch).clone() for batch in (prompt, decode)]
    with torch.autocast(runner.buffers.packed.tensor.device.type, dtype=torch.bfloat16):
        got = [runner.execute(batch).clone() for batch in (prompt, decode)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_unknown_names_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"no path 'CUDA'.*recorded FULL"):
        run_parity(tiny.factory(), ["CUDA"])
    with pytest.raises(ConfigError, match="no workload 'nothing'"):
        run_parity(tiny.factory(), workloads=["nothing"])
    assert set(GRAPH_PATHS) < set(PATHS)


# ---- no LoRA


COMPILED = [(path, "inductor") for path in GRAPH_PATHS if "CUDA" in path]


@pytest.mark.parametrize(("path", "how"), [*((path, "none") for path in GRAPH_PATHS), *COMPILED])
def test_graphs_without_lora_are_those_of_a_model_without_lora(
    tiny: Tiny, path: str, how: str
) -> None:
    """vLLM #25914: an idle adapter engine launches exactly what an engine without LoRA does."""
    plain = tiny.factory(enable_lora=False, compile=how)(**PATHS[path])
    with_lora = tiny.factory(compile=how)(**PATHS[path])
    assert {key.descriptor.num_active_loras for key in plain.runner.graphs} == {0}
    for key in plain.runner.graphs:
        assert with_lora.runner.nodes(key) == plain.runner.nodes(key)


@pytest.mark.parametrize("path", GRAPH_PATHS)
def test_disabled_lora_costs_no_graph_memory(tiny: Tiny, path: str) -> None:
    """Its graphs take exactly what those without LoRA take in an engine that has both."""
    plain = tiny.factory(enable_lora=False)(**PATHS[path])
    both = tiny.factory()(**PATHS[path])
    assert [case.num_active_loras for case in plain.capture_report.cases] == [
        0 for _ in plain.capture_report.cases
    ]
    assert both.runner.backend is not None
    dispatcher = both.runner.dispatcher
    dispatcher.drop([key for key in dispatcher.keys if key.descriptor.has_lora])
    fresh = both.runner.backend.fresh()
    runner = ModelRunner(both.runner.model, both.runner.buffers, dispatcher, fresh)
    report = WarmUp(runner, max_num_seqs=9, max_model_len=128).run()
    assert report.graphs == plain.capture_report.graphs < both.capture_report.graphs
    assert report.pool_memory == plain.capture_report.pool_memory


# ---- poison


@pytest.mark.parametrize("what", [(), *[(name,) for name in POISON]], ids=str)
@pytest.mark.parametrize("path", available_paths())
def test_poison_changes_nothing(zoo: SignatureZoo, path: str, what: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "num_kv_blocks": 16}
    device = "cuda" if "CUDA" in path else "cpu"
    llm = LLM(
        zoo.model, enable_lora=True, max_loras=2, max_num_batched_tokens=16, device=device,
        **options, **PATHS[path],
    )  # fmt: skip
    loras = [LoRARequest("a", zoo("down-7")), None, LoRARequest("b", zoo("v-2"))]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with poisoned(llm, *what):
        outputs = llm.generate([[4]] * 3, params, loras, progress=False)
    base = [(5 + i) % 32 for i in range(20)]
    assert [output.token_ids for output in outputs] == [[7] * 20, base, [2] * 20]


def test_poison_of_an_unknown_kind(zoo: SignatureZoo) -> None:
    llm = LLM(zoo.model, device="cpu", num_kv_blocks=4)
    with pytest.raises(ValueError, match=r"knows stale_buffers.*not 'salt'"), poisoned(llm, "salt"):
        pass


# ---- memory, and what warm-up leaves


def test_the_largest_graph_sizes_the_pool(tmp_path: Path) -> None:
    """All recorded graphs together take about what the largest one does."""
    model = make_tiny_llama(tmp_path / "m")
    pools = [
        LLM(
            model, graph="recorded", graph_mode="full", capture_sizes=sizes, max_num_seqs=8,
            device="cpu", num_kv_blocks=40,
        ).capture_report.pool_memory
        for sizes in ([8], [1, 2, 3, 4, 5, 6, 7, 8])
    ]  # fmt: skip
    assert pools[1] <= 1.1 * pools[0]


def test_max_graph_memory_drops_graphs_and_says_so(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    make, path = tiny.factory(capture_sizes=[1, 2, 4, 8]), PATHS["recorded both"]
    want = make(**path, max_graph_memory=None)
    none = make(**path, max_graph_memory=0)
    assert none.capture_report.graphs == 0
    assert len(none.capture_report.dropped) == want.capture_report.graphs
    assert "max_graph_memory=0 MiB holds 0 of" in caplog.text
    assert "all need about 1 MiB" in caplog.text, "whole ones, as the option; never 0"
    assert make(**path, max_graph_memory=1000).capture_report.dropped == ()
    prompts = [[5, 6, 7]] * 4
    params = SamplingParams(temperature=0, max_tokens=8)
    loras = [LoRARequest(name, folder) for name, folder in tiny.adapters.items()] + [None]
    outputs = [llm.generate(prompts, params, loras, progress=False) for llm in (want, none)]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert none.runner.num_steps[GraphMode.NONE] == sum(none.runner.num_steps.values())


def test_serving_from_some_of_the_graphs(tiny: Tiny, monkeypatch: Any) -> None:
    """What is kept after a drop chooses, fits and answers right."""
    monkeypatch.setattr("minilora.engine.startup.MIB", 1)  # these graphs take less than a MiB
    make, path = tiny.factory(capture_sizes=[1, 2, 4, 8]), PATHS["recorded both"]
    costs = WarmUp(make(**path).runner, max_num_seqs=8, max_model_len=64).measure_costs()
    every = make(**path).runner.dispatcher.keys
    llm = make(**path, max_graph_memory=costs.of(every) * 3 // 4)
    assert 0 < llm.capture_report.graphs < len(every)
    report = run_parity(llm, workloads=[*QUICK, "long"], adapters=tiny.adapters)
    report.assert_ok()
    replayed = llm.runner.num_steps
    assert replayed[GraphMode.FULL] + replayed[GraphMode.PIECEWISE] > 0


def test_memory_that_ends_while_graphs_are_captured(tiny: Tiny, monkeypatch: Any) -> None:
    plain = ModelRunner.capture

    def full_after_three(self: ModelRunner, *args: Any) -> None:
        if len(self.graphs) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(self, *args)

    monkeypatch.setattr(ModelRunner, "capture", full_after_three)
    reason = r"full after 3 of \d+ graphs.*need about \d+ MiB.*lower.*max_graph_memory.*'none'"
    with pytest.raises(ConfigError, match=reason):
        tiny.factory()(**PATHS["recorded both"])


def test_warm_up_leaves_no_trace(tiny: Tiny) -> None:
    llm = tiny.factory()(**PATHS["recorded both"])
    assert llm.list_adapters() == []
    slots = llm.scheduler.slots
    assert slots is not None
    assert slots.resident == []
    assert slots.num_swaps == 0
    for layer in llm.runner.model.lora_layers():
        assert not layer.lora_ranks.any()
        assert not any(stack.any() for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked))
    assert not llm.kv_cache.tensor[:, :, 1:].any(), "only the padding block was written"
    assert llm.scheduler.pool.num_free == 60
