"""`compile="inductor"`: the lessons of vLLM #14626, on the CPU's Inductor.

Only four functions of tensors are compiled (`minilora.model.fused`), so most of those faults have
nowhere to live; these tests keep it so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minilora import LLM, LoRARequest, SamplingParams
from minilora.config.errors import ConfigError
from minilora.model.fused import Fused, num_compilations
from minilora.testing.tolerances import LOGIT_TOLERANCE

FUNCTIONS = 4


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each test counts its own compilations; what was compiled comes from Inductor's cache."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_kv_blocks": 60,
        "device": "cpu",
        "compile": "inductor",
    }
    return LLM(model, **{**defaults, **options})


class Traffic:
    """Prompts of many lengths, with two adapters and without."""

    def __init__(self, tiny_adapter: Callable[..., Path]) -> None:
        folders = [tiny_adapter(f"compile-{r}", r=r, target_modules="all-linear") for r in (2, 8)]
        self.loras = [None, *(LoRARequest(folder.name, folder) for folder in folders)]

    def __call__(self, llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        answers = []
        for rows in (1, 2, 3, 8):
            prompts = [[5 + row] * length for row, length in zip(range(rows), [1, 40, 7] * 3)]  # noqa: B905
            loras = [self.loras[row % 3] for row in range(rows)] if llm.config.enable_lora else None
            outputs = llm.generate(prompts, params, loras, progress=False)
            answers += [output.token_ids for output in outputs]
        return answers


@pytest.fixture
def traffic(tiny_adapter: Callable[..., Path]) -> Traffic:
    return Traffic(tiny_adapter)


def compiled_by(run: Callable[[], Any]) -> int:
    before = num_compilations()
    run()
    return num_compilations() - before


def test_serving_compiles_nothing_and_is_right(tiny_llama: Path, traffic: Traffic) -> None:
    llms: list[LLM] = []
    assert compiled_by(lambda: llms.append(make(tiny_llama))) == 2 * FUNCTIONS, "one row, and more"
    want = traffic(make(tiny_llama, compile="none"))
    answers: list[Any] = []
    assert compiled_by(lambda: answers.extend(traffic(llms[0]))) == 0
    assert answers == want, "adapters that came after the warm-up included"


def test_other_sizes_and_flags_are_right_and_share_the_code(
    tiny_llama: Path, traffic: Traffic
) -> None:
    """#14626: buffers entered the code with their sizes, flags and counts were baked in."""
    traffic(make(tiny_llama))
    changes: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 100, "max_num_seqs": 20},
        {"specialize_lora": False, "specialize_active_lora": False},
        {"max_loras": 1},
        {"enable_lora": False},
    ]
    for change in changes:
        answers: list[Any] = []
        compiled = compiled_by(lambda: answers.extend(traffic(make(tiny_llama, **change))))  # noqa: B023
        assert compiled == 0, change
        assert answers == traffic(make(tiny_llama, compile="none", **change)), change


def arguments(name: str, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of a compiled function; its other sizes are 32, 16 and the 64 rows of a table."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if name == "rotate":
        positions = torch.arange(rows, dtype=torch.int32) % 64
        table = torch.rand(64, 8, generator=generator)
        return normal(rows, 6, 16), positions, table, table, 4, 1
    if name == "silu_and_mul":
        return (normal(rows, 64),)
    streams = [normal(rows, 32) for _ in range(2 if name == "add_rms_norm" else 1)]
    return *streams, normal(32), 1e-5


NAMES = ["rms_norm", "add_rms_norm", "rotate", "silu_and_mul"]


@pytest.mark.parametrize("first", [8192, 64, 32])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_size_is_not_a_constant(name: str, first: int) -> None:
    """#14626: the warm-up ran at exactly the largest size, and 8192 was taken for a constant.

    So may a number of rows that happens to be another size too: a width, or a table's length.
    """
    fused = Fused(compiled=True)

    def run(rows: int) -> None:
        args = arguments(name, rows)
        torch.testing.assert_close(getattr(fused, name)(*args), getattr(Fused(), name)(*args))

    assert compiled_by(lambda: run(first)) == 1
    assert compiled_by(lambda: [run(rows) for rows in (2, 8191, 65, 33, 5, 64, 32, 8193)]) == 0
    assert compiled_by(lambda: [run(1), run(1)]) == 1, "one row is a compilation of its own"


def test_a_mark_forgotten_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see without the mark."""
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    fused = Fused(compiled=True)
    fused.silu_and_mul(torch.randn(8192, 64))
    assert compiled_by(lambda: fused.silu_and_mul(torch.randn(5, 64))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_functions_agree_with_plain_ones(name: str, dtype: torch.dtype) -> None:
    plain, compiled = getattr(Fused(), name), getattr(Fused(compiled=True), name)
    for rows in (6, 1):
        args = arguments(name, rows, dtype)
        torch.testing.assert_close(
            compiled(*args), plain(*args), rtol=LOGIT_TOLERANCE[dtype], atol=1e-5
        )


def test_compile_does_not_go_with_the_recorder(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile='inductor' does not go with graph='recorded'"):
        make(tiny_llama, graph="recorded")
    with pytest.raises(ConfigError, match=r"compile='inductr'.*did you mean 'inductor'"):
        make(tiny_llama, compile="inductr")


SECOND_PROCESS = """
import sys
from minilora import LLM, SamplingParams
llm = LLM(sys.argv[1], compile="inductor", device="cpu", num_kv_blocks=30, max_model_len=64,
          max_num_seqs=4, max_num_batched_tokens=int(sys.argv[2]))
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
print([o.token_ids for o in llm.generate([[5] * 20, [6]], params, progress=False)])
"""


@pytest.mark.slow
def test_a_warm_cache_of_another_size_is_right(tiny_llama: Path, tmp_path: Path) -> None:
    """#14626: code of another max_num_batched_tokens came out of the compile cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def answers(tokens: int) -> str:
        command = [sys.executable, "-c", SECOND_PROCESS, str(tiny_llama), str(tokens)]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert answers(16) == answers(64) == answers(16)
    assert any(tmp_path.rglob("*")), "the cache was used"
