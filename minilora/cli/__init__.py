"""The command line: ``minilora demo | generate | verify | inspect | bench | fetch``.

Nothing here imports torch before a command needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minilora import __version__
from minilora.cli import bench, demo, fetch, generate, inspect, verify
from minilora.cli.output_file import write_anything
from minilora.config.errors import MiniloraError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 right, 1 failed or refused, 2 wrong usage."""
    args = _parser().parse_args(argv)
    write_anything()
    try:
        return int(args.run(args))
    except (MiniloraError, TimeoutError, OSError) as error:
        print(f"minilora {args.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minilora: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minilora", description="Serve many LoRA adapters of one Llama in shared batches."
    )
    parser.add_argument("--version", action="version", version=f"minilora {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, verify, inspect, bench, fetch):
        command.add_to(commands)
    return parser
