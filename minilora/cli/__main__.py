"""``python -m minilora.cli``."""

from minilora.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
