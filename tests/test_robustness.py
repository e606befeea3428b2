"""What must not take the engine, or another caller's request, with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minilora import LLM, AdapterError, LoRARequest, RequestError, SamplingParams
from minilora.cli import main
from minilora.demo_model import demo_model
from minilora.engine.intake import Intake
from minilora.engine.lock import EngineLock

BASE = [3, 9, 4]
WANT = [5, 6, 7, 8]


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture
def make_llm(zoo: Any) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults = {"enable_lora": True, "num_kv_blocks": 64, "max_num_seqs": 16, "device": "cpu"}
        return LLM(zoo.model, **{**defaults, **options})

    return make


def assert_nothing_held(llm: LLM) -> None:
    assert not llm.has_unfinished_requests()
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.num_blocks
    assert all(info.num_users == 0 for info in llm.list_adapters())
    assert all(version.running == version.preempted == 0 for version in llm._slots.resident)


def during_execute(llm: LLM, action: Callable[[], None]) -> None:
    """Run `action` once, in the middle of the next step."""
    plain = llm.runner.execute

    def execute(batch: Any) -> Any:
        llm.runner.execute = plain  # type: ignore[method-assign]
        action()
        return plain(batch)

    llm.runner.execute = execute  # type: ignore[method-assign]


def test_a_stream_closed_in_the_middle_of_a_step(make_llm: Any, zoo: Any) -> None:
    """As the garbage collector does: in this very thread, between two lines of a step."""
    llm = make_llm()
    stream = llm.stream([BASE, BASE], greedy(50), LoRARequest("a", zoo("down-7")))
    next(stream)
    during_execute(llm, stream.close)
    outputs = llm.generate([BASE, BASE], greedy())
    assert [output.token_ids for output in outputs] == [WANT, WANT]
    assert_nothing_held(llm)


def test_a_token_that_cannot_be_used_fails_its_request_only(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_llama, num_kv_blocks=64, device="cpu")
    want = llm.generate("Hello", greedy(6))[0].token_ids
    stream = llm.stream("Hello", greedy(6))
    next(stream)
    (broken,) = llm.scheduler.running

    def push(token: int, watch: bool = True) -> str:
        raise ZeroDivisionError("no text")

    monkeypatch.setattr(broken.detokenizer, "push", push)
    assert llm.generate("Hello", greedy(6))[0].token_ids == want
    last = list(stream)[-1]
    assert last.finish_reason == "error"
    assert "ZeroDivisionError: no text" in str(last.output.error)
    assert not llm.has_unfinished_requests()


def test_an_adapter_that_cannot_be_written_fails_its_request_only(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    layer = llm._slots.layers[0]
    plain = layer.write_slot

    def write_slot(slot: int, modules: Any) -> None:
        raise MemoryError("no memory for the slot")

    layer.write_slot = write_slot
    loras = [None, LoRARequest("a", zoo("down-7")), None]
    outputs = llm.generate([BASE] * 3, greedy(), loras)
    assert (outputs[1].finish_reason, outputs[1].error) == ("error", "no memory for the slot")
    assert [outputs[i].token_ids for i in (0, 2)] == [WANT, WANT]
    assert_nothing_held(llm)
    layer.write_slot = plain
    assert llm.generate([BASE], greedy(), loras[1])[0].token_ids == [7] * 4


def test_a_reload_between_the_check_and_the_queue(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    llm.load_adapter("a", zoo("down-7"))
    plain = llm._intake._rng

    def rng(*args: Any) -> Any:
        llm._intake._rng = plain
        llm.load_adapter("a", zoo("down-9"))
        return plain(*args)

    llm._intake._rng = rng
    assert llm.generate([BASE], greedy(), LoRARequest("a"))[0].token_ids == [7] * 4
    assert llm.generate([BASE], greedy(), LoRARequest("a"))[0].token_ids == [9] * 4
    assert_nothing_held(llm)


def test_a_missing_adapter_lets_go_of_those_before_it(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    loras = [LoRARequest("a", zoo("down-7")), LoRARequest("b", "no/such/folder")]
    with pytest.raises(AdapterError, match="no/such/folder"):
        llm.generate([BASE, BASE], greedy(n=3), loras)
    assert_nothing_held(llm)
    llm.unload_adapter("a", timeout=0)


def test_outputs_of_add_request_are_not_lost_to_other_callers(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    first = llm.add_request(BASE, greedy(2), LoRARequest("a", zoo("down-7")))
    llm.generate([BASE], greedy(6))
    second = llm.add_request(BASE, greedy(3), LoRARequest("a"))
    llm.unload_adapter("a", timeout=30)
    assert llm.has_unfinished_requests()
    outputs = {output.request_id: output.token_ids for output in llm.step()}
    assert outputs == {first: [7, 7], second: [7, 7, 7]}
    assert_nothing_held(llm)


def test_base_requests_pass_one_that_waits_for_a_slot_when_blocks_are_few(
    make_llm: Any, zoo: Any
) -> None:
    llm = make_llm(max_loras=1, num_kv_blocks=10, block_size=8)
    llm.add_request(BASE, greedy(30), LoRARequest("a", zoo("down-7")))
    llm.step()
    llm.add_request([4] * 60, greedy(1), LoRARequest("b", zoo("down-9")))  # too big for now
    base = llm.add_request(BASE, greedy(1))
    ended = []
    while llm.has_unfinished_requests():
        ended += [output.request_id for output in llm.step()]
    assert ended[0] == base


def test_the_engine_lock_is_fair() -> None:
    """Who releases it and wants it back at once, as a loop of steps does, queues up again."""
    lock, order = EngineLock(), []

    def wait_for_it() -> None:
        with lock:
            order.append("the one that waited")

    waiting = threading.Thread(target=wait_for_it)
    with lock:
        waiting.start()
        deadline = time.monotonic() + 10
        while not lock._turnstile.locked() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert lock._turnstile.locked(), "who waits stands at the turnstile"
    with lock:
        order.append("the one that looped")
    waiting.join()
    assert order == ["the one that waited", "the one that looped"]


def test_an_interrupt_while_requests_are_made_holds_no_adapter(
    make_llm: Any, zoo: Any, monkeypatch: Any
) -> None:
    llm = make_llm()
    llm.load_adapter("a", zoo("down-7"))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Intake, "_rng", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([BASE, BASE], greedy(n=2), LoRARequest("a"), progress=False)
    assert_nothing_held(llm)
    llm.unload_adapter("a", timeout=0)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_as_requests_are_queued_leaves_none(
    make_llm: Any, zoo: Any, monkeypatch: Any
) -> None:
    """It is delivered at the end of the lock, before the caller has the requests."""
    llm = make_llm()
    plain = llm.core.add

    def add(*args: Any) -> None:
        plain(*args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(llm.core, "add", add)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([BASE], greedy(), LoRARequest("a", zoo("down-7")), progress=False)
    assert_nothing_held(llm)


def test_what_is_refused_replaces_no_adapter(make_llm: Any, zoo: Any) -> None:
    llm = make_llm()
    llm.load_adapter("a", zoo("down-7"))
    llm.pin_adapter("a")
    before = llm.list_adapters()
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        llm.generate([BASE, []], greedy(), LoRARequest("a", zoo("down-9")), progress=False)
    assert llm.list_adapters() == before
    loras = [LoRARequest("a", zoo("down-9")), LoRARequest("b", "no/such/folder")]
    with pytest.raises(AdapterError, match="no/such/folder"):
        llm.generate([BASE, BASE], greedy(), loras, progress=False)
    assert llm.list_adapters() == before


def test_one_call_with_two_folders_of_one_name(make_llm: Any, zoo: Any) -> None:
    """Each prompt gets what its own request means, in order, and each folder is read once."""
    llm = make_llm()
    llm.load_adapter("a", zoo("down-7"))
    reads: list[str] = []
    plain = llm._slots.registry._read

    def read(name: str, path: str) -> Any:
        reads.append(Path(path).name)
        return plain(name, path)

    llm._slots.registry._read = read
    loras = [LoRARequest("a"), LoRARequest("a", zoo("down-9")), LoRARequest("a")]
    outputs = llm.generate([BASE] * 4, greedy(), [*loras, loras[1]], progress=False)
    assert [output.token_ids for output in outputs] == [[7] * 4, [9] * 4, [9] * 4, [9] * 4]
    assert reads == [Path(zoo("down-9")).name]
    assert_nothing_held(llm)


def test_an_engine_built_under_inference_mode_serves_outside_of_it(zoo: Any) -> None:
    with torch.inference_mode():
        llm = LLM(zoo.model, num_kv_blocks=64, device="cpu", graph="recorded", capture_sizes=[1])
    assert llm.generate(BASE, greedy(), progress=False)[0].token_ids == WANT


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """A process that a shell started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_between_the_release_and_the_end_is_not_lost() -> None:
    """Another thread takes the lock and leaves it before the interrupt is delivered."""

    class Released:
        def __init__(self, lock: threading.Lock) -> None:
            self.acquire, self._lock = lock.acquire, lock

        def release(self) -> None:
            self._lock.release()
            if threading.current_thread() is threading.main_thread():
                os.kill(os.getpid(), signal.SIGINT)
                other = threading.Thread(target=step)
                other.start()
                other.join()

    def step() -> None:
        with lock:
            pass

    lock = EngineLock()
    lock._lock = Released(lock._lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_as_the_lock_is_taken_leaves_it_free() -> None:
    """Between `acquire` and the next line it would belong to nobody, for ever."""

    class Acquired:
        def __init__(self, lock: threading.Lock) -> None:
            self.release, self._lock = lock.release, lock

        def acquire(self) -> None:
            self._lock.acquire()
            os.kill(os.getpid(), signal.SIGINT)

    lock = EngineLock()
    plain = lock._lock
    lock._lock = Acquired(plain)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert not plain.locked()


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_waits_for_the_end_of_the_engines_critical_part() -> None:
    lock, reached = EngineLock(), []

    def step() -> None:
        with lock, lock:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the rest of the step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with lock:
        pass


@pytest.fixture
def own_handlers() -> Iterator[list[int]]:
    """Handlers of SIGUSR1, which raises, and of SIGTERM, and what they saw."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if number == signal.SIGUSR1:
            raise TimeoutError

    kept = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield seen
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_timeout_waits_for_the_end_of_the_engines_critical_part(own_handlers: list[int]) -> None:
    """A handler that raises inside would be taken for a failed step, or leave a slot in use."""
    lock, reached = EngineLock(), []

    def step() -> None:
        with lock:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            reached.append("the rest of the step")

    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            step()
    assert len(reached) == 2
    assert own_handlers == [signal.SIGUSR1, signal.SIGTERM] * 2, "one raises, both are called"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_aborts(make_llm: Any) -> None:
    """As at a shutdown: the handler wants the lock that its own thread holds or is taking."""
    llm = make_llm()
    ids = [llm.add_request(BASE, greedy(30)) for _ in range(3)]

    def abort(*_: Any) -> None:
        for name in ids:
            llm.abort(name)

    kept = signal.signal(signal.SIGUSR1, abort)
    try:
        during_execute(llm, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        llm.step()
    finally:
        signal.signal(signal.SIGUSR1, kept)
    assert not llm.has_unfinished_requests()
    assert_nothing_held(llm)


def test_the_end_is_seen_only_with_all_of_the_text(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minilora.engine.detokenizer import Detokenizer

    llm = LLM(tiny_llama, num_kv_blocks=64, device="cpu")
    seen: list[str | None] = []
    plain = Detokenizer.flush

    def flush(self: Any) -> str:
        seen.extend(request.finish_reason for request in llm.scheduler.running)
        return plain(self)

    monkeypatch.setattr(Detokenizer, "flush", flush)
    llm.generate("Hello", greedy(3))
    stream = llm.stream("Hello", greedy(9))
    next(stream)
    llm.abort(next(stream).request_id)
    assert seen == [None, None]


def test_load_adapter_without_a_folder(make_llm: Any) -> None:
    with pytest.raises(AdapterError, match="'a'"):
        make_llm().load_adapter("a", None)


NO_PROMPTS = [{"prompt": "hello"}, b"ab", 5, [b"ab"], [{"a": 1}], np.array(5)]


@pytest.mark.parametrize("prompts", NO_PROMPTS, ids=str)
def test_prompts_that_are_none(make_llm: Any, prompts: Any) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, greedy())
    with pytest.raises(RequestError, match="the prompt"):
        llm.add_request(prompts, greedy())


@pytest.mark.parametrize("messages", [None, 5, "Hi", {"role": "user"}, [5], [[]], [[{}]]])
def test_messages_that_are_none(messages: Any) -> None:
    llm = LLM(demo_model(), device="cpu", num_kv_blocks=16)
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages, greedy())


def test_parameters_that_are_none(make_llm: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams"):
        make_llm().generate([BASE], {"max_tokens": 2})


# ---- files of the command line


def generate(model: Path, *args: str) -> int:
    options = ["--num-kv-blocks", "64", "--max-tokens", "2", "--temperature", "0"]
    return main(["generate", "--model", str(model), *options, *args])


def test_an_output_file_is_replaced_at_the_end_only(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    line = json.dumps({"prompt": "Hi"}) + "\n"
    file.write_text(line)
    both = ["--input", str(file), "--output", str(file)]
    assert generate(tmp_path / "nowhere", *both) == 1
    assert file.read_text() == line, "a failed run keeps the input"
    assert [path.name for path in tmp_path.iterdir()] == ["both.jsonl"]
    assert generate(tiny_llama, *both) == 0
    assert json.loads(file.read_text())["finish_reason"] == "length"


def test_odd_characters_in_prompts(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = '{"prompt": "a\\ud800"}\n{"prompt": "a\u2028b"}\n{"prompt": "c", "adapter": 5}\n'
    text += '{"prompt": ' + "[" * 100_000 + "\n"
    source.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert generate(tiny_llama, "--input", str(source), "--output", str(out)) == 1
    records = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert len(records) == 4
    assert records[1]["error"] is None
    assert "adapter=5 must be a name" in records[2]["error"]
    assert "no valid JSON" in records[3]["error"]


@pytest.mark.parametrize("output", [["--output", "-"], []])
def test_a_terminal_without_the_characters(output: list[str], tiny_llama: Path) -> None:
    """Python would end with an error at the first, and lose the answers after it."""
    args = ["generate", "--model", str(tiny_llama), "--prompt", "a\udce9", "--prompt", "b\u2028"]
    args += ["--num-kv-blocks", "64", "--max-tokens", "2", "--ignore-eos", *output]
    code = f"import sys; from minilora.cli import main; sys.exit(main({args!r}))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert b"Traceback" not in done.stderr
    assert b"\\udce9" in done.stdout
    if output:
        first, second = (json.loads(line) for line in done.stdout.decode("utf-8").split("\n")[:2])
        assert "surrogate" in first["error"]
        assert len(second["token_ids"]) == 2


def test_several_answers_have_a_row_each(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--prompt", "Hi", "--n", "3", "--ignore-eos"]
    assert generate(tiny_llama, *args) == 0
    assert capsys.readouterr().out.count("length") == 3
    assert generate(tiny_llama, *args, "--logprobs", "1") == 1
    assert "--logprobs needs --output" in capsys.readouterr().err


def test_an_input_that_is_no_text(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}')
    assert generate(tiny_llama, "--input", str(file)) == 1
    assert "no UTF-8 text (byte 12)" in capsys.readouterr().err


def test_min_tokens_is_checked_against_what_the_checkpoint_allows(tiny_llama: Path) -> None:
    args = ["--num-kv-blocks", "64", "--prompt", "Hi", "--min-tokens", "20"]
    assert main(["generate", "--model", str(tiny_llama), *args]) == 1  # the default is 16
    assert main(["generate", "--model", str(tiny_llama), *args, "--max-tokens", "21"]) == 0
