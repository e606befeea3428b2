"""`lora_embedding_shrink`: the shrink of an embedding, a look-up instead of a product.

LoRA on an embedding adds ``B @ A[:, token]`` to the row of a token. Its first half reads one
column of A a row; `lora_expand` does the second half.
"""

from __future__ import annotations

import torch

from minilora.ops.kernel_meta import KernelMeta
from minilora.ops.routing import check_call


def lora_embedding_shrink(
    input_ids: torch.Tensor, lora_a: torch.Tensor, meta: KernelMeta
) -> torch.Tensor:
    """Look up each row's token in the A of its adapter.

    Args:
        input_ids: int ``[T]``. It is only read: in a graph it is an input buffer whose padding
            is not cleared, so writing into it piles up garbage (vLLM #14626).
        lora_a: ``[max_loras, vocab, r]``, transposed against PEFT's, so that a token is a row.
        meta: routing of the same T rows.

    Returns:
        ``h`` for `lora_expand`, one slice; zeros for rows without an adapter.

    Raises:
        ValueError: `meta` routes another number of rows than there are ids.
    """
    check_call("lora_embedding_shrink", input_ids.shape[0], meta)
    slots = meta.token_lora_mapping.long()
    rows = lora_a[slots.clamp(min=0), input_ids.long()].float()  # [T, r]
    return torch.where((slots >= 0)[:, None], rows, 0.0)[None]  # [1, T, r]
