"""``python -m minilora``: the same as the command ``minilora``."""

from minilora.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
