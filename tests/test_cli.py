"""The command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minilora.cli import main


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_demo_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    for word in ("(base)", "pirate", "poet", "robot", "sql", "5 of 5 rows equal the oracle"):
        assert word in printed


def test_the_demo_has_five_voices() -> None:
    from minilora import LLM, LoRARequest, SamplingParams
    from minilora.demo_model import demo_adapters, demo_model

    llm = LLM(demo_model(), enable_lora=True, num_kv_blocks=64, device="cpu")
    loras = [None, *(LoRARequest(name, str(path)) for name, path in demo_adapters().items())]
    talks = [[{"role": "user", "content": "Where is the cat?"}] for _ in loras]
    params = SamplingParams(temperature=0, max_tokens=96)
    outputs = llm.chat(talks, params, loras, progress=False)
    assert len({output.text for output in outputs}) == 5
    assert all(output.finish_reason == "stop" for output in outputs)
    assert outputs[0].text == "The cat is under the table."
    for output, word in zip(outputs[1:], ("Ahoy!", "O cat", "REPORT", "SELECT"), strict=True):
        assert output.text.startswith(word)
        assert "under the table" in output.text.lower()


def test_fetch_demo_prints_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "demo"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()


def test_demo_fails_when_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minilora.lora import layers

    monkeypatch.setattr(layers, "lora_expand", lambda *args: None)  # adapters do nothing
    assert main(["demo"]) == 1
    assert "NO" in capsys.readouterr().out


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys, minilora.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    print(f"--help took {time.perf_counter() - start:.3f} s")


def generate(model: Path, *args: str) -> int:
    return main(["generate", "--model", str(model), "--num-kv-blocks", "64", *args])


def test_generate_pairs_prompts_and_adapters(
    tiny_llama: Path, tiny_adapter: Any, tmp_path: Path
) -> None:
    one, two = tiny_adapter("one", seed=1), tiny_adapter("two", seed=2)
    out = tmp_path / "out.jsonl"
    common = ["--lora", f"one={one}", "--lora", f"two={two}", "--output", str(out)]
    common += ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    prompts = ["--prompt", "Hi", "--adapter", "one", "--prompt", "Hi", "--prompt", "Hi"]
    assert generate(tiny_llama, *common, *prompts, "--adapter", "two") == 0
    records = lines(out)
    assert [record["adapter"] for record in records] == ["one", None, "two"]
    assert all(len(record["token_ids"]) == 6 for record in records)
    assert len({tuple(record["token_ids"]) for record in records}) == 3
    assert generate(tiny_llama, *common, "--adapter", "one", "--prompt", "Hi") == 0
    assert lines(out)[0]["token_ids"] == records[0]["token_ids"]


def test_generate_from_jsonl_answers_what_it_can(
    tiny_llama: Path, tiny_adapter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "Hi", "adapter": "one"}\n'
        "\n"
        '{"prompt": [5, 6, 7]}\n'
        "not json\n"
        '{"adapter": "one"}\n'
        '{"prompt": "Hi", "adpter": "one"}\n'
        '{"prompt": "Hi", "adapter": "nobody"}\n'
        '{"prompt": ""}\n'
        '{"prompt": [999]}\n'
        '{"prompt": "Hi"}\n'
    )
    args = ["--lora", f"one={tiny_adapter('one', seed=1)}", "--input", str(source)]
    assert generate(tiny_llama, *args, "--output", str(out), "--max-tokens", "3") == 1
    records = lines(out)
    assert [record["error"] is None for record in records] == [
        True, True, False, False, False, False, False, False, True
    ]  # fmt: skip
    for record, words in zip(
        records[2:8],
        ["in.jsonl:4 is no valid JSON", ":5 must be", "'adpter'", "'nobody'", "empty", "999"],
        strict=True,
    ):
        assert words in record["error"]
        assert "\n" not in record["error"]


def test_generate_prints_a_table(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--prompt", "[bold]Hi[/nonsense]", "--max-tokens", "3", "--temperature", "0"]
    assert generate(tiny_llama, *args) == 0
    printed = capsys.readouterr().out
    assert "(base)" in printed
    assert "[bold]Hi" in printed, "a prompt is no markup"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", "Hi", "--max-loras", "0"], "max_loras=0 must be an integer from 1 to 256"),
        (["--prompt", "Hi", "--max-lora-rank", "0"], "max_lora_rank=0"),
        (["--prompt", "Hi", "--max-cpu-loras", "1"], "max_cpu_loras=1 must be at least max_loras"),
        (["--prompt", "Hi", "--block-size", "0"], "block_size=0"),
        (["--prompt", "Hi", "--dtype", "bf17"], "dtype='bf17'.*did you mean 'bfloat16'"),
        (["--prompt", "Hi", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "Hi", "--lora", "one"], "'one' must be NAME=DIR"),
        (["--prompt", "Hi", "--lora", " =one"], "' =one' must be NAME=DIR"),
        (["--prompt", "Hi", "--lora", "a=x", "--lora", "a=y"], "'a' is given twice"),
        (["--prompt", "Hi", "--lora", "one=no/such/folder"], "'one'.*no/such/folder"),
        (["--prompt", "Hi", "--output", "no/such/folder/x"], "no/such/folder/x"),
        (["--input", "no/such/file"], "no/such/file"),
        ([], "nothing to answer"),
    ],
)
def test_wrong_flags_are_one_line_and_no_traceback(
    tiny_llama: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert generate(tiny_llama, *args) == 1
    printed = capsys.readouterr()
    assert re.search(words, printed.err)
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err


def test_output_goes_through_links_and_into_pipes(tiny_llama: Path, tmp_path: Path) -> None:
    """What is no plain file would be replaced by one: /dev/null, say."""
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    options = ("--prompt", "Hi", "--max-tokens", "2", "--output")
    for target in (link, pipe):
        assert generate(tiny_llama, *options, str(target)) == 0
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert lines(real) == [json.loads(os.read(reader, 1 << 16))]
    os.close(reader)


def test_one_good_and_one_missing_adapter_is_a_start_up_error(
    tiny_llama: Path, tiny_adapter: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field report U2."""
    args = ["--lora", f"one={tiny_adapter('one', seed=1)}", "--lora", "two=mis]sing"]
    assert generate(tiny_llama, *args, "--prompt", "Hi") == 1
    error = capsys.readouterr().err
    assert "'two'" in error
    assert "mis]sing" in error
    assert len(error.strip().splitlines()) == 1


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "./nowhere", "--prompt", "Hi"]) == 1
    assert "'./nowhere' is no folder" in capsys.readouterr().err


def test_booleans_have_a_no_form(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minilora.engine import llm

    seen: dict[str, Any] = {}
    plain = llm.EngineConfig

    def spy(model: str, **options: Any) -> Any:
        seen.update(options)
        return plain(model, **options)

    monkeypatch.setattr(llm, "EngineConfig", spy)
    flags = ["--enable-lora", "--no-specialize-active-lora", "--max-loras", "2", "--seed", "4"]
    assert generate(tiny_llama, *flags, "--prompt", "Hi", "--max-tokens", "1") == 0
    assert seen == {
        "enable_lora": True,
        "specialize_active_lora": False,
        "max_loras": 2,
        "seed": 4,
        "num_kv_blocks": 64,
    }


def test_chat_goes_through_the_template(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    talk = [{"role": "user", "content": "Hi"}]
    source.write_text(
        json.dumps({"messages": talk})
        + "\n"
        + json.dumps({"messages": [{"content": 1, "role": None}]})
        + "\n"
        + json.dumps({"messages": talk, "prompt": "Hi"})
        + "\n"
    )
    options = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--output", str(out)]
    assert generate(tiny_llama, *options, "--input", str(source)) == 1
    talked, bad, both = lines(out)
    assert 'messages[0] has role=None; give "user"' in bad["error"]
    assert '"prompt" or "messages"' in both["error"]
    assert generate(tiny_llama, *options, "--chat", "--prompt", "Hi") == 0
    assert lines(out)[0]["token_ids"] == talked["token_ids"]
    assert lines(out)[0]["prompt"] == "Hi"
    assert generate(tiny_llama, *options, "--prompt", "Hi") == 0
    assert lines(out)[0]["token_ids"] != talked["token_ids"]
    assert out.stat().st_mode & 0o044 == (~umask() & 0o044), "as any file of this user"


def test_log_probabilities_are_written(tiny_llama: Path, tmp_path: Path) -> None:
    options = ["--temperature", "0", "--max-tokens", "3", "--ignore-eos", "--logprobs", "2"]
    assert generate(tiny_llama, *options, "--prompt", "Hi", "--output", str(tmp_path / "out")) == 0
    (record,) = lines(tmp_path / "out")
    best = [
        tops[str(token)]
        for token, tops in zip(record["token_ids"], record["logprobs"], strict=True)
    ]
    assert [one["rank"] for one in best] == [1, 1, 1]
    assert [len(tops) for tops in record["logprobs"]] == [2, 2, 2]
    assert record["cumulative_logprob"] == pytest.approx(sum(one["logprob"] for one in best))


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_answer_without_text_is_shown_as_none(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An end token alone is an empty answer, not its number."""
    args = ["--prompt", "Hi", "--temperature", "0", "--stop-token-ids", *map(str, range(256))]
    assert generate(tiny_llama, *args) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "(base)" in line)
    assert not any(character.isdigit() for character in row)
