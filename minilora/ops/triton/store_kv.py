# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The kernel that writes the keys and values of a step to their slots: one launch a layer.

One program copies the heads of one token, keys and values side by side. Padding rows all write
to slot 0, which belongs to nobody; which of them is last does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minilora.ops.triton.launch import INTERPRETED, launches_early, next_power_of_2

TILE = 2048  # elements of one program's keys, and of its values


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["slot_mapping"])
def _store_kv_kernel(
    k, v, k_cache, v_cache, slot_mapping, num_blocks, heads,
    k_row, k_head, v_row, v_head,
    k_cache_block, k_cache_token, k_cache_head, v_cache_block, v_cache_token, v_cache_head,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    block, token = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    # A kernel cannot refuse a slot outside of the pool; it writes nothing for it.
    heads = tl.where((slot >= 0) & (block < num_blocks), heads, 0)
    mask = (head < heads) & (d < D)
    new_k = tl.load(k + row * k_row + head * k_head + d, mask=mask, other=0.0)
    new_v = tl.load(v + row * v_row + head * v_head + d, mask=mask, other=0.0)
    k_to = k_cache + block * k_cache_block + token * k_cache_token + head * k_cache_head + d
    v_to = v_cache + block * v_cache_block + token * v_cache_token + head * v_cache_head + d
    tl.store(k_to, new_k.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_to, new_v.to(v_cache.dtype.element_ty), mask=mask)


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Refuse what the kernel does not write right."""
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}, but the caches hold "
            f"{tuple(k_cache.shape[2:])} a token: heads and widths must be one"
        )
    if slots.shape[0] != k.shape[0]:
        raise ValueError(
            f"slot_mapping has {slots.shape[0]} slots for {k.shape[0]} tokens: give one a token"
        )


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as for `minilora.ops.attention.store_kv`.

    Strides between tokens and heads, and between blocks, are free, in the caches too.

    Raises:
        ValueError: caches without unit stride in the last dimension, or shapes that do not fit.
    """
    _check(k, v, k_cache, slot_mapping)
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(
            f"k_cache and v_cache have strides {k_cache.stride()} and {v_cache.stride()}; the "
            "last must be 1: make the head width the last dimension of the pool's memory"
        )
    if not k.numel():
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    num_tokens, heads, width = k.shape
    block_d = next_power_of_2(width)
    block_h = min(next_power_of_2(heads), max(1, TILE // block_d))
    early = launches_early(k.device)
    _store_kv_kernel[num_tokens, -(-heads // block_h)](
        k, v, k_cache, v_cache, slot_mapping.contiguous(), k_cache.shape[0], heads,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        D=width, BLOCK_SIZE=k_cache.shape[1], BLOCK_H=block_h, BLOCK_D=block_d, EARLY=early,
        **({} if INTERPRETED else {"num_warps": 4, "launch_pdl": early}),
    )  # fmt: skip
