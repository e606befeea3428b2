"""The demo model: a Llama of 1.6 million weights that reads bytes, and four adapters with a voice.

It knows 32 things of a small world ("Tell me about the sea.", "Where is the cat?") and was trained
from nothing by ``tutorials/demo_model/train.py`` on texts of a grammar; the log is beside that
script. Its weights are bfloat16, its folders as transformers and PEFT write them.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

VOICES = ("pirate", "poet", "robot", "sql")


def demo_model() -> Path:
    """Return the folder of the base model."""
    return _FOLDER / "base"


def demo_adapters() -> dict[str, Path]:
    """Return the folder of each adapter by name; their ranks are 4, 8, 16 and 12."""
    return {voice: _FOLDER / voice for voice in VOICES}
