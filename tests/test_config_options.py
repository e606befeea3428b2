"""`EngineConfig`, `SamplingParams` and `LoRARequest`: what a user may type, and what is refused."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minilora.cli.options import add_flags, given
from minilora.config import (
    ConfigError,
    EngineConfig,
    LoRARequest,
    MiniloraError,
    SamplingParams,
    UnknownOptionError,
)
from minilora.config.errors import known_names, nearest

HUGE = 10**309  # an int that no float holds


def refused(make: Callable[..., object], match: str, **options: Any) -> None:
    """The options are refused in one short line that matches."""
    with pytest.raises(ConfigError, match=match) as caught:
        make(**options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def engine(**options: Any) -> EngineConfig:
    return EngineConfig("folder", **options)


# ---- EngineConfig

ENGINE_RANGES = {
    "max_loras": (1, 256),
    "max_lora_rank": (1, 256),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 1 << 20),
    "block_size": (1, 1024),
    "seed": (0, 2**63 - 1),
    "max_cpu_loras": (1, 1 << 20),
    "max_model_len": (1, 1 << 24),
    "num_kv_blocks": (2, 1 << 30),
    "max_graph_memory": (0, 1 << 30),
}
MAY_BE_NONE = ("max_cpu_loras", "max_model_len", "num_kv_blocks", "max_graph_memory")


@pytest.mark.parametrize(("name", "bounds"), ENGINE_RANGES.items())
def test_engine_range(name: str, bounds: tuple[int, int]) -> None:
    low, high = bounds
    wrong: list[object] = [low - 1, -1, high + 1, HUGE, 1.5, 4.0, "4", True, [4], math.nan]
    if name not in MAY_BE_NONE:
        wrong.append(None)
    for value in wrong:
        refused(engine, f"LLM: {name}=.* must be an integer from {low} to {high}", **{name: value})


def test_engine_edges_are_accepted() -> None:
    smallest = {name: low for name, (low, _) in ENGINE_RANGES.items()}
    largest = {name: high for name, (_, high) in ENGINE_RANGES.items()}
    for options in (smallest, largest):
        config = engine(**options)
        assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_loras": 0}, "max_loras=0 must be an integer from 1"),
        ({"max_loras": -1}, "max_loras=-1 must be"),
        ({"max_lora_rank": 0}, "max_lora_rank=0 must be an integer from 1 to 256"),
        ({"block_size": 0}, "block_size=0 must be an integer from 1"),
        (
            {"max_cpu_loras": 3, "max_loras": 4},
            "max_cpu_loras=3 must be at least max_loras=4: every adapter in a slot",
        ),
        ({"dtype": "bf17"}, "dtype='bf17' must be one of 'auto'.*did you mean 'bfloat16'"),
    ],
)
def test_the_cases_of_report_u4(options: dict[str, Any], match: str) -> None:
    refused(engine, match, **options)


def test_host_cache_may_equal_the_slots() -> None:
    assert engine(max_cpu_loras=4, max_loras=4).max_cpu_loras == 4
    assert engine(max_cpu_loras=None, max_loras=256).max_cpu_loras is None


def test_every_request_must_be_able_to_add_a_token() -> None:
    refused(
        engine,
        "max_num_batched_tokens=63 must be at least max_num_seqs=64",
        max_num_batched_tokens=63,
    )
    assert engine(max_num_batched_tokens=64).max_num_seqs == 64


@pytest.mark.parametrize("dtype", ["", "float", "BFLOAT16", None, 16, torch.float16, ["float16"]])
def test_engine_dtype(dtype: object) -> None:
    refused(engine, "dtype=.* must be one of 'auto', 'float32', 'float16', 'bfloat16'", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("graph", ["auto", "cuda", "recorded", "none"]),
        ("graph_mode", ["full_and_piecewise", "full", "piecewise", "none"]),
    ],
)
def test_engine_graph_choices(name: str, choices: list[str]) -> None:
    assert getattr(engine(), name) == choices[0]
    for value in choices:
        assert getattr(engine(**{name: value}), name) == value
    for wrong in ("", choices[1].upper(), None, True, 1, choices):
        refused(engine, f"LLM: {name}=.* must be one of '{choices[0]}'", **{name: wrong})


def test_a_misspelt_graph_names_the_nearest() -> None:
    refused(engine, "graph='recordd' must.*did you mean 'recorded'", graph="recordd")


@pytest.mark.parametrize("sizes", [[1, 2, 4], (1, 2, 4), [64], range(1, 4)])
def test_capture_sizes_are_kept_as_a_tuple(sizes: Sequence[int]) -> None:
    config = engine(capture_sizes=sizes)
    assert config.capture_sizes == tuple(sizes)
    assert isinstance(config.capture_sizes, tuple)
    assert dataclasses.replace(config, seed=1).capture_sizes == tuple(sizes)


def test_capture_sizes_are_the_users_no_longer() -> None:
    sizes = [1, 2]
    config = engine(capture_sizes=sizes)
    sizes.append(0)  # after the check
    assert config.capture_sizes == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ([], r"capture_sizes=\[\] must be a list of one or more sizes; leave it out"),
        (8, "capture_sizes=8 must be a list"),
        ("1,2", "capture_sizes='1,2' must be a list"),
        (b"\x01", "must be a list"),
        ([10**5000], "a huge integer is over max_num_batched_tokens=2048"),
        ({1, 2}, "capture_sizes={1, 2} must be a list"),
        ([0, 1], "capture_sizes=.*: 0 must be an integer of at least 1"),
        ([-1], "-1 must be an integer of at least 1"),
        ([True, 2], "True must be an integer"),
        ([1, 2.0], "2.0 must be an integer"),
        ([1, "2"], "'2' must be an integer"),
        ([1, None], "None must be an integer"),
        ([2, 1], "must ascend without repeats, but 1 follows 2"),
        ([1, 2, 2], "must ascend without repeats, but 2 follows 2"),
        ([1, 2049], "2049 is over max_num_batched_tokens=2048.*raise max_num_batched_tokens"),
        (range(2, 5000), r"capture_sizes=range\(2, 5000\): 4999 is over"),
    ],
)
def test_capture_sizes_that_are_none(sizes: object, match: str) -> None:
    refused(engine, f"LLM: .*{match}", capture_sizes=sizes)


def test_the_limit_of_capture_sizes_depends_on_the_mode() -> None:
    for mode in ("full_and_piecewise", "piecewise", "none"):
        assert engine(capture_sizes=[65, 2048], graph_mode=mode).graph_mode == mode
    assert engine(capture_sizes=[64], graph_mode="full").capture_sizes == (64,)
    refused(
        engine, "65 is over max_num_seqs=64.*raise max_num_seqs",
        capture_sizes=[8, 65], graph_mode="full",
    )  # fmt: skip


def test_graph_flags_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "engine", EngineConfig, {"model"})
    args = parser.parse_args("--capture-sizes 1 2 8 --graph none --max-graph-memory 0".split())
    options = given(args, EngineConfig)
    assert options == {"capture_sizes": [1, 2, 8], "graph": "none", "max_graph_memory": 0}
    assert engine(**options).capture_sizes == (1, 2, 8)


@pytest.mark.parametrize("name", ["enable_lora", "specialize_lora", "specialize_active_lora"])
def test_engine_switches(name: str) -> None:
    for value in (1, 0, "true", None, np.bool_(True)):
        refused(engine, f"{name}=.* must be true or false", **{name: value})
    assert getattr(engine(**{name: True}), name) is True


def test_engine_memory_share() -> None:
    for value in (0, 0.0, 1.01, -0.5, math.nan, math.inf, "0.9", True, None, HUGE):
        refused(engine, "gpu_memory_utilization=.* must be a number", gpu_memory_utilization=value)
    assert engine(gpu_memory_utilization=1).gpu_memory_utilization == 1


@pytest.mark.parametrize("value", [5, b"adapters", ["adapters"], True])
def test_engine_adapter_root_is_a_path(value: object) -> None:
    refused(engine, "adapter_root=", adapter_root=value)
    assert engine(adapter_root="adapters").adapter_root == "adapters"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_lora", "max_loras"),
        ("max_loras_rank", "max_lora_rank"),
        ("max_cpu_lora", "max_cpu_loras"),
        ("enable_loras", "enable_lora"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_seq_len", "max_model_len"),
        ("Block_size", "block_size"),
        ("num_gpu_blocks", "num_kv_blocks"),
    ],
)
def test_an_unknown_engine_option_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"{name!r}; did you mean {meant!r}"):
        engine(**{name: 4})
    with pytest.raises(TypeError):  # the class that Python itself raises
        engine(**{name: 4})


def test_an_option_near_nothing_gets_no_guess() -> None:
    with pytest.raises(UnknownOptionError, match=r"no option 'zzz'$"):
        engine(zzz=1)


def test_engine_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine().max_loras = 9  # type: ignore[misc]
    assert dataclasses.replace(engine(), max_loras=9).max_loras == 9
    with pytest.raises(ConfigError, match="max_loras=0"):
        dataclasses.replace(engine(), max_loras=0)


# ---- SamplingParams


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**options)


SAMPLING_RANGES: dict[str, tuple[Sequence[object], Sequence[object]]] = {
    # name: (accepted, refused besides what is no number at all)
    "n": ([1, 1024], [0, -1, 1025, 1.0]),
    "temperature": ([0, 0.0, 0.7, 100], [-0.1, 100.5, math.nan, math.inf]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 50.0]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.1, math.nan]),
    "min_p": ([0, 0.5, 1.0], [-0.1, 1.1, math.nan]),
    "repetition_penalty": ([0.01, 1.0, 100.0], [0, 0.0, 0.009, -1.0, 101.0, math.nan]),
    "max_tokens": ([1, 2**31 - 1], [0, -1, 2**31, 5.0]),
    "min_tokens": ([0, 16], [-1, 17, 1.0]),
}


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_sampling_range(name: str) -> None:
    accepted, wrong = SAMPLING_RANGES[name]
    for value in accepted:
        assert getattr(sampling(**{name: value}), name) == value
    for value in (*wrong, "1", None, True, [1], HUGE):
        refused(SamplingParams, f"SamplingParams: {name}=", **{name: value})


@pytest.mark.parametrize("name", ["seed", "logprobs"])
def test_sampling_numbers_that_may_be_none(name: str) -> None:
    assert getattr(SamplingParams(), name) is None
    assert getattr(sampling(**{name: 0}), name) == 0
    for value in (-1, 1.0, "1", True, HUGE):
        refused(SamplingParams, f"{name}=", **{name: value})


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams().greedy


def test_min_tokens_is_at_most_max_tokens() -> None:
    fault = "min_tokens=9 is more than max_tokens=8; raise max_tokens"
    refused(SamplingParams, fault, max_tokens=8, min_tokens=9)


def test_numbers_of_numpy_are_numbers() -> None:
    stops = np.array([5, 6])
    params = SamplingParams(max_tokens=np.int64(3), stop_token_ids=stops, seed=np.int8(1))
    assert params == SamplingParams(max_tokens=3, stop_token_ids=[5, 6], seed=1)
    assert type(params.max_tokens) is int
    assert EngineConfig("m", max_loras=np.int32(2)).max_loras == 2
    for wrong in (np.float64(3.0), np.True_, stops):
        refused(SamplingParams, "max_tokens=.* must be an integer", max_tokens=wrong)
    refused(SamplingParams, "stop_token_ids=.* must be an integer", stop_token_ids=[stops])


def test_a_model_without_a_name() -> None:
    refused(EngineConfig, "model='' must be a folder or a hub id", model="")


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (None, ()),
        ([], ()),
        ("end", ("end",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ((text for text in ("a", "b")), ("a", "b")),
    ],
)
def test_stop_strings(stop: Any, want: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == want


@pytest.mark.parametrize("stop", ["", ["a", ""], [5], [None], 5, b"end", True])
def test_stop_that_is_no_text(stop: object) -> None:
    refused(SamplingParams, "SamplingParams: stop=", stop=stop)


@pytest.mark.parametrize(
    "tokens",
    [[7, 30], (7, 30), range(7, 31, 23), np.array([7, 30]), (token for token in (7, 30))],
    ids=["list", "tuple", "range", "array", "generator"],
)
def test_stop_token_ids(tokens: Any) -> None:
    params = SamplingParams(stop_token_ids=tokens)
    for _ in range(2):  # a generator that was read while it was checked would be empty
        assert [int(token) for token in params.stop_token_ids or ()] == [7, 30]


@pytest.mark.parametrize("tokens", [5, [-1], [2**31], ["7"], [7.0], [True], [None], "77", 7.5])
def test_stop_token_ids_that_are_none(tokens: object) -> None:
    refused(SamplingParams, "SamplingParams: stop_token_ids=", stop_token_ids=tokens)


def test_stop_token_ids_are_the_users_no_longer() -> None:
    tokens = [7]
    params = SamplingParams(stop_token_ids=tokens)
    tokens.append(-5)  # after the check
    assert list(params.stop_token_ids or ()) == [7]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stops", "stop"),
        ("ignore_eos_token", "ignore_eos"),
        ("stop_strings", "stop"),  # a field, but not one to give
    ],
)
def test_an_unknown_sampling_option_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"{name!r}; did you mean '{meant}"):
        sampling(**{name: 1})


def test_ignore_eos_is_a_switch() -> None:
    refused(SamplingParams, "ignore_eos=1 must be true or false", ignore_eos=1)


def test_params_can_be_copied() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], seed=5)
    assert dataclasses.replace(params, n=2).stop_strings == ("a",)
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 0  # type: ignore[misc]


def test_defaults_of_a_checkpoint() -> None:
    given = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "eos_token_id": [1, 2]}
    params = SamplingParams.from_generation_config(
        {**given, "repetition_penalty": 1.1, "max_new_tokens": 7, "do_sample": True}
    )
    assert params == SamplingParams(
        temperature=0.6, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, max_tokens=7
    )
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    nothing = dict.fromkeys(given)
    assert SamplingParams.from_generation_config(nothing) == SamplingParams()


def test_a_checkpoint_that_asks_for_greedy_gets_it() -> None:
    assert SamplingParams.from_generation_config({"temperature": 0.0}).greedy
    assert SamplingParams.from_generation_config({"temperature": 0}).greedy


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty", "max_new_tokens"])
def test_defaults_of_a_checkpoint_out_of_range(name: str) -> None:
    ours = name.replace("max_new_tokens", "max_tokens")
    for value in (-1, "0.6", HUGE, [1]):
        with pytest.raises(ConfigError, match=f"{ours}="):
            SamplingParams.from_generation_config({name: value})


# ---- LoRARequest


def test_lora_request() -> None:
    request = LoRARequest("sql", "adapters/sql")
    assert (request.name, request.path) == ("sql", "adapters/sql")
    assert LoRARequest("sql").path is None
    assert LoRARequest("sql", Path("adapters") / "sql") == request
    assert hash(LoRARequest("sql", "adapters/sql")) == hash(request)
    assert repr(request) == "LoRARequest('sql', 'adapters/sql')"
    assert request not in (LoRARequest("sql"), LoRARequest("sq", "adapters/sql"), "sql", None)
    assert pickle.loads(pickle.dumps(request)) == copy.copy(request) == request


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("sql", 1, "adapters/sql"), {}),
        (("sql", 1, Path("adapters/sql")), {}),
        (("sql", 1), {"lora_path": "adapters/sql"}),
        ((), {"lora_name": "sql", "lora_int_id": 1, "lora_path": "adapters/sql"}),
    ],
    ids=["positional", "path", "mixed", "keywords"],
)
def test_the_form_of_vllm_is_refused_with_the_right_one(
    args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"LoRARequest\('sql', 'adapters/sql'\)"):
        LoRARequest(*args, **options)


def test_the_form_of_vllm_without_a_path() -> None:
    with pytest.raises(TypeError, match=r"no integer id: write LoRARequest\('sql', "):
        LoRARequest("sql", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "  ", "\n", None, 5, b"sql", ["sql"]])
def test_an_adapter_name_that_is_none(name: Any) -> None:
    with pytest.raises(TypeError, match="name="):
        LoRARequest(name, "adapters/sql")


@pytest.mark.parametrize("path", [b"adapters", ["adapters"], 1.5])
def test_an_adapter_path_that_is_none(path: Any) -> None:
    with pytest.raises(TypeError, match="path="):
        LoRARequest("sql", path)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", os.fspath(Path("x")).encode()])
def test_a_path_that_no_file_can_have(path: Any) -> None:
    class Given:
        def __fspath__(self) -> Any:
            return path

    with pytest.raises(TypeError, match=r"LoRARequest path=.* is no path that a file can have"):
        LoRARequest("sql", Given())


# ---- the sentences


def test_every_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_loras"):
        engine(max_loras=0)
    assert issubclass(UnknownOptionError, (MiniloraError, TypeError))


def test_names_in_a_sentence() -> None:
    assert known_names([]) == "none"
    assert known_names(["b", "a"]) == "'a', 'b'"
    assert len(known_names(["x" * 5000])) < 200
    assert known_names([f"{i:02}" for i in range(30)], most=2) == "'00', '01' and 28 more"
    assert nearest("sqq", ["sql", "pirate"]) == "; did you mean 'sql'?"
    assert nearest("zzz", ["sql"]) == ""
    assert nearest("x", []) == ""
