"""``minilora demo``: three adapters and the base model in one batch, checked by the oracle."""

from __future__ import annotations

import argparse
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minilora.engine.outputs import RequestOutput

MAX_TOKENS = 8
LETTERS = string.ascii_lowercase  # token id = place in the alphabet
# What each row asks for: prompt, adapter. The adapter "always-x" answers x to everything.
ROWS = [
    ("abc", None),
    ("abc", "always-x"),
    ("hello", "always-k"),
    ("xyzabc", None),
    ("hello", "says-g"),
    ("lora", "always-x"),
]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="serve three adapters and the base model in one batch, and check the answers",
        description="Make a tiny Llama that says the alphabet and three adapters that each insist "
        "on one letter, serve them and the base model in one batch, and compare every answer "
        "with an oracle that merges the weights. The exit code says whether all is right.",
    )
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto"')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the checkpoint, answer, compare; 0 if every row is right."""
    with tempfile.TemporaryDirectory(prefix="minilora-demo-") as folder:
        return _run(Path(folder), args.device)


def _run(folder: Path, device: str) -> int:
    from rich.console import Console

    from minilora import LLM, LoRARequest, SamplingParams
    from minilora.testing import Oracle

    console = Console()
    console.print("Making a tiny Llama and three adapters ...")
    model, adapters = _make(folder)
    llm = LLM(model, enable_lora=True, max_loras=3, device=device, num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    loras = [LoRARequest(name, adapters[name]) if name else None for _, name in ROWS]
    prompts = [[LETTERS.index(letter) for letter in prompt] for prompt, _ in ROWS]
    outputs = llm.generate(prompts, params, loras, progress=False)

    oracle = Oracle(model)
    expected = [
        oracle.greedy(prompt, MAX_TOKENS, adapter=adapters[name] if name else None)
        for prompt, (_, name) in zip(prompts, ROWS, strict=True)
    ]
    slots = {info.name: info.lora_slot for info in llm.list_adapters()}
    console.print(_table(outputs, expected, slots))
    right = sum(out.token_ids == want for out, want in zip(outputs, expected, strict=True))
    console.print(f"{right} of {len(ROWS)} rows equal the oracle, which merges each adapter.")
    return 0 if right == len(ROWS) else 1


def _make(folder: Path) -> tuple[Path, dict[str, str]]:
    from minilora.testing import make_signature_adapter, make_signature_llama

    model = make_signature_llama(folder / "model")
    kinds = {"always-x": "down", "always-k": "down", "says-g": "v"}
    adapters = {}
    for name, kind in kinds.items():
        token = LETTERS.index(name[-1])
        path = make_signature_adapter(folder / name, model, kind=kind, token=token)
        adapters[name] = str(path)
    return model, adapters


def _table(
    outputs: list[RequestOutput], expected: list[list[int]], slots: dict[str, int | None]
) -> Any:
    from rich.table import Table

    table = Table("row", "prompt", "served by", "slot", "answer", "oracle", "right")
    for row, ((prompt, name), output, want) in enumerate(zip(ROWS, outputs, expected, strict=True)):
        served = output.adapter or "(base)"
        slot = "-" if name is None else str(slots[name])
        right = "yes" if output.token_ids == want else "NO"
        table.add_row(str(row), prompt, served, slot, _text(output.token_ids), _text(want), right)
    return table


def _text(token_ids: list[int]) -> str:
    return "".join(LETTERS[token] if token < len(LETTERS) else "?" for token in token_ids)
