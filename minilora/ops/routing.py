"""What the wrappers of the LoRA ops check before they call an op."""

from __future__ import annotations

from minilora.ops.kernel_meta import KernelMeta


def check_call(op: str, num_rows: int, meta: KernelMeta, num_active_loras: int = 0) -> None:
    """Refuse metadata that describes other rows than the op receives, and a negative grid.

    Raises:
        ValueError: with both numbers of rows (vLLM issue 51121), or the grid.
    """
    described = meta.token_lora_mapping.shape[0]
    if num_rows != described:
        raise ValueError(
            f"{op} got {num_rows} rows, but its KernelMeta describes {described}; "
            "rows that were gathered need a KernelMeta of their own"
        )
    if num_active_loras < 0:  # as the end of a slice it would serve all groups but the last
        raise ValueError(f"{op} got num_active_loras={num_active_loras}; 0 is the least")
