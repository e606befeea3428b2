"""Read the JSON files of checkpoints and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minilora.config.errors import CheckpointError

MAX_CONFIG_BYTES = 1 << 20


def read_json_object(path: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object of bounded size; a `CheckpointError` names the file and the fault."""
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)  # a size can be wrong, and a pipe has none
        if len(text) > most_bytes:
            raise CheckpointError(f"{path} has more than {most_bytes} bytes, the most that is read")
        content = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
