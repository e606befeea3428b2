"""``minilora generate``: answer prompts from the command line or a JSONL file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilora.cli.made import parse_loras
from minilora.cli.options import add_flags, given
from minilora.cli.output_file import open_output
from minilora.config.engine import EngineConfig
from minilora.config.errors import MiniloraError, RequestError
from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams

if TYPE_CHECKING:
    from minilora.engine.llm import LLM
    from minilora.engine.outputs import CompletionOutput, RequestOutput

_EXAMPLES = """examples:
  minilora generate --model llama --prompt "Once upon a time"
  minilora generate --model llama --lora sql=adapters/sql --lora pirate=adapters/pirate \\
      --prompt "All users" --adapter sql --prompt "Hello" --adapter pirate --prompt "Hello"
  minilora generate --model llama --lora sql=adapters/sql --input prompts.jsonl --output out.jsonl
"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts, each with its own adapter or none",
        description="Answer prompts with one model and any number of adapters, in shared batches.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or a hub id")
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="load an adapter under a name (repeatable; turns --enable-lora on)",
    )
    parser.add_argument(
        "--prompt", action=_Prompt, dest="prompts", default=[], help="a prompt (repeatable)"
    )
    parser.add_argument(
        "--adapter",
        action=_Adapter,
        metavar="NAME",
        help="the adapter of the --prompt before it; before the first: of all that name none",
    )
    parser.add_argument(
        "--input", metavar="FILE", help='JSONL of {"prompt": ..., "adapter": ...}; - is stdin'
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write JSONL here instead of a table; - is stdout"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a user's message, through the tokenizer's chat template",
    )
    # The engine's --seed makes a whole run repeatable, so a request needs none of its own here.
    add_flags(parser, "sampling", SamplingParams, {"seed"})
    add_flags(parser, "engine", EngineConfig, {"model"})
    parser.set_defaults(run=run)


class _Prompt(argparse.Action):
    """Collect each prompt with the adapter that follows it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.prompts = [*namespace.prompts, {"prompt": values}]


class _Adapter(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if namespace.prompts:
            namespace.prompts[-1]["adapter"] = values
        else:
            namespace.adapter = values


def run(args: argparse.Namespace) -> int:
    """Answer everything that was asked; 1 if any prompt failed."""
    entries = [*args.prompts, *_read_lines(args.input)]
    if not entries:
        raise RequestError("there is nothing to answer; give --prompt or --input")
    from minilora.engine.llm import LLM  # torch is only imported here

    options = given(args, EngineConfig, leave_out={"model"})
    adapters = parse_loras(args.lora, args.model)
    if adapters:
        options.setdefault("enable_lora", True)
    sampling = given(args, SamplingParams, leave_out={"seed"})
    if args.output is None and "logprobs" in sampling:
        raise RequestError("--logprobs needs --output FILE: the table does not show them")
    # A wrong value is found before the model is loaded; the checkpoint may allow more tokens.
    SamplingParams(**{"max_tokens": 1 << 30, **sampling})
    with open_output("--output", args.output) as output:
        llm = LLM(args.model, **options)
        for name, path in adapters.items():
            llm.load_adapter(name, path)
        params = dataclasses.replace(llm.get_default_sampling_params(), **sampling)
        if args.chat:
            entries = [_as_chat(entry) for entry in entries]
        records = _answer(llm, entries, params, args.adapter)
        if output is None:
            _print_table(records, with_text=llm.tokenizer is not None)
        else:
            output.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return int(any(record["error"] for record in records))


def _read_lines(file: str | None) -> list[dict[str, Any]]:
    """Read a JSONL file; a line that is no record is kept as an error, so nothing is lost."""
    if file is None:
        return []
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = raw.decode("utf-8-sig")  # a byte order mark is no part of the first record
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is no UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"--input {file!r} cannot be read: {error.strerror}") from None
    return [
        _entry(f"{file}:{number}", line)
        for number, line in enumerate(text.split("\n"), 1)  # U+2028 may stand in a string
        if line.strip()
    ]


def _entry(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"prompt": None, "error": f"{where} is no valid JSON: {error}"}
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        return {"prompt": None, "error": f'{where} must be an object with "prompt" or "messages"'}
    entry.setdefault("prompt", None)
    unknown = set(entry) - {"prompt", "messages", "adapter"}
    if unknown:
        entry["error"] = (
            f'{where} has the unknown key {min(unknown)!r}; use "prompt" or "messages", "adapter"'
        )
    if not isinstance(entry.get("adapter"), (str, type(None))):
        entry["error"] = f"{where}: adapter={entry.pop('adapter')!r} must be a name"
    return entry


def _answer(
    llm: LLM, entries: list[dict[str, Any]], params: SamplingParams, default: str | None
) -> list[dict[str, Any]]:
    """Answer what can be answered; each entry gives one record, in order."""
    good: dict[int, str] = {}
    for index, entry in enumerate(entries):
        entry.setdefault("adapter", default)
        if not entry.get("error"):
            try:
                prompt = entry["prompt"]
                if "messages" in entry:
                    prompt = llm.chat_token_ids(entry["messages"])
                good[index] = llm.add_request(prompt, params, _lora(entry["adapter"]))
            except (MiniloraError, TypeError) as error:
                entry["error"] = str(error)
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    return [
        _record(entry, outputs[good[index]] if index in good else None)
        for index, entry in enumerate(entries)
    ]


def _as_chat(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("error") or "messages" in entry:
        return entry
    return {**entry, "messages": [{"role": "user", "content": entry["prompt"]}]}


def _lora(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name)


def _record(entry: dict[str, Any], output: RequestOutput | None) -> dict[str, Any]:
    record = {key: entry.get(key) for key in ("prompt", "adapter", "error")}
    if "messages" in entry:
        record["messages"] = entry["messages"]
    if output is None:
        return {**record, "text": None, "token_ids": [], "finish_reason": "error"}
    record["error"] = output.error
    answers = [_answer_record(one) for one in output.outputs]
    return {**record, **answers[0], **({"answers": answers} if len(answers) > 1 else {})}


def _answer_record(one: CompletionOutput) -> dict[str, Any]:
    record = {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
    if one.logprobs is None:
        return record
    logprobs = [
        {token: dataclasses.asdict(logprob) for token, logprob in of_token.items()}
        for of_token in one.logprobs
    ]
    return {**record, "logprobs": logprobs, "cumulative_logprob": one.cumulative_logprob}


def _print_table(records: list[dict[str, Any]], with_text: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("adapter", "prompt", "answer", "ended by", show_lines=True)
    for record in records:
        asked = record["prompt"] if "messages" not in record else record["messages"]
        for one in record.get("answers", [record]):
            tokens = " ".join(map(str, one["token_ids"]))
            answer = record["error"] or (one["text"] if with_text else tokens)
            cells = (record["adapter"] or "(base)", str(asked), answer)
            table.add_row(*map(Text, cells), one["finish_reason"])
    Console().print(table)
