"""``minilora demo``: three adapters and the base model in one batch, on every path, checked."""

from __future__ import annotations

import argparse
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minilora.engine.llm import LLM
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
        "on one letter, serve them and the base model in one batch, on every path of this machine "
        "(eagerly, from recorded graphs, from CUDA graphs), and compare every answer with an "
        "oracle that merges the weights. The exit code says whether all is right.",
    )
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto"')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the checkpoint, answer, compare; 0 if every row is right."""
    with tempfile.TemporaryDirectory(prefix="minilora-demo-") as folder:
        return _run(Path(folder), args.device)


def _run(folder: Path, device: str) -> int:
    from rich.console import Console

    from minilora.testing import Oracle
    from minilora.testing.parity import available_paths

    console = Console()
    console.print("Making a tiny Llama and three adapters ...")
    model, adapters = _make(folder)
    oracle = Oracle(model)
    expected = [
        oracle.greedy(_ids(prompt), MAX_TOKENS, adapter=adapters[name] if name else None)
        for prompt, name in ROWS
    ]
    wrong = 0
    paths = [path for path in available_paths() if device != "cpu" or "CUDA" not in path]
    for path in paths:
        llm, outputs = _serve(path, model, adapters, device)
        right = sum(out.token_ids == want for out, want in zip(outputs, expected, strict=True))
        wrong += len(ROWS) - right
        if path == paths[0]:
            slots = {info.name: info.lora_slot for info in llm.list_adapters()}
            console.print(_table(outputs, expected, slots))
        verdict = f"{right} of {len(ROWS)} rows equal the oracle"
        console.print(f"{path:18} {verdict}; {_steps(llm)}", soft_wrap=True)
    console.print("The oracle merges each adapter into the weights. minilora verify checks more.")
    return 0 if wrong == 0 else 1


def _serve(
    path: str, model: Path, adapters: dict[str, str], device: str
) -> tuple[LLM, list[RequestOutput]]:
    from minilora import LLM, LoRARequest, SamplingParams
    from minilora.testing.parity import PATHS

    llm = LLM(
        model,
        enable_lora=True,
        max_loras=3,
        device="cpu" if "recorded" in path else device,
        num_kv_blocks=64,
        max_num_seqs=len(ROWS),
        max_num_batched_tokens=64,
        **PATHS[path],
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    loras = [LoRARequest(name, adapters[name]) if name else None for _, name in ROWS]
    return llm, llm.generate([_ids(prompt) for prompt, _ in ROWS], params, loras, progress=False)


def _steps(llm: LLM) -> str:
    """Say how many steps ran, and how many of them from graphs."""
    counts = {mode.name: count for mode, count in llm.runner.num_steps.items() if count}
    eager = counts.pop("NONE", 0)
    parts = [f"{count} {name}" for name, count in counts.items()]
    return f"{sum(counts.values())} steps replayed ({', '.join(parts) or 'none'}), {eager} eager"


def _ids(prompt: str) -> list[int]:
    return [LETTERS.index(letter) for letter in prompt]


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
