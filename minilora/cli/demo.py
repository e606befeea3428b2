"""``minilora demo``: one prompt, five voices, one batch, on every path, checked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minilora.engine.llm import LLM
    from minilora.engine.outputs import RequestOutput
    from minilora.testing import Oracle

PROMPT = "Tell me about the sea."
MAX_TOKENS = 96


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="answer one prompt in five voices in one batch, and check the answers",
        description="Serve a tiny Llama that comes with minilora and four adapters with voices of "
        "their own. One prompt is answered by all five in one batch, on every path of this machine "
        "(eagerly, from recorded graphs, from CUDA graphs), and every token is compared with an "
        "oracle that merges the weights. The exit code says whether all is right.",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        default=PROMPT,
        help=f'what to ask (default: "{PROMPT}"); the model knows 32 things, such as the moon, '
        "the cat, the kettle, and where each of them is",
    )
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto"')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer on every path, compare; 0 if every row is right."""
    from rich.console import Console

    from minilora.demo_model import demo_model
    from minilora.testing import Oracle
    from minilora.testing.parity import available_paths

    console, oracle = Console(), Oracle(demo_model())
    paths = available_paths(args.device)
    wrong = 0
    for path in paths:
        llm, outputs = _answer(path, args.prompt, args.device)
        verdicts = [_is_right(oracle, output) for output in outputs]
        wrong += verdicts.count(False)
        if path == paths[0]:
            slots = {info.name: info.lora_slot for info in llm.list_adapters()}
            console.print(_table(args.prompt, outputs, verdicts, slots))
        verdict = f"{verdicts.count(True)} of {len(verdicts)} rows equal the oracle"
        console.print(f"{path:18} {verdict}; {_steps(llm)}", soft_wrap=True)
    console.print("The oracle merges each adapter into the weights. minilora verify checks more.")
    return 0 if wrong == 0 else 1


def _answer(path: str, prompt: str, device: str) -> tuple[LLM, list[RequestOutput]]:
    """Answer the prompt in all voices, in one batch, on one path."""
    from minilora import LLM, LoRARequest, SamplingParams
    from minilora.demo_model import demo_adapters, demo_model
    from minilora.testing.parity import PATHS

    loras = [None, *(LoRARequest(name, str(folder)) for name, folder in demo_adapters().items())]
    rows, prompts = len(loras), 256  # what the two kinds of graphs are captured for
    sizes = {"recorded FULL": [rows], "CUDA FULL": [rows], "eager": None}.get(path, [rows, prompts])
    llm = LLM(
        demo_model(),
        dtype="float32",  # so that it can be compared with the oracle token by token
        enable_lora=True,
        max_loras=4,
        device="cpu" if "recorded" in path else device,
        num_kv_blocks=64,
        max_num_seqs=rows,
        max_num_batched_tokens=512,
        capture_sizes=sizes,
        **PATHS[path],
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    talks = [[{"role": "user", "content": prompt}] for _ in loras]
    return llm, llm.chat(talks, params, loras, progress=False)


def _is_right(oracle: Oracle, output: RequestOutput) -> bool:
    """Return whether each token is the oracle's best after those before it."""
    from minilora.demo_model import demo_adapters

    adapter = demo_adapters()[output.adapter] if output.adapter else None
    start = len(output.prompt_token_ids)
    best = oracle.logits([*output.prompt_token_ids, *output.token_ids], adapter).argmax(-1)
    return best[start - 1 : -1].tolist() == output.token_ids


def _steps(llm: LLM) -> str:
    """Say how many steps ran, and how many of them from graphs."""
    counts = {mode.name: count for mode, count in llm.runner.num_steps.items() if count}
    eager = counts.pop("NONE", 0)
    parts = [f"{count} {name}" for name, count in counts.items()]
    return f"{sum(counts.values())} steps replayed ({', '.join(parts) or 'none'}), {eager} eager"


def _table(
    prompt: str, outputs: list[RequestOutput], verdicts: list[bool], slots: dict[str, int | None]
) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("row", "served by", "slot", "answer", "right", title=Text(prompt))
    for row, (output, right) in enumerate(zip(outputs, verdicts, strict=True)):
        slot = "-" if output.adapter is None else str(slots[output.adapter])
        served, verdict = output.adapter or "(base)", "yes" if right else "NO"
        table.add_row(str(row), served, slot, Text(output.text), verdict)
    return table
