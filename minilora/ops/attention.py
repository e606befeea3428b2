"""Paged attention: the contract, and bodies on `scaled_dot_product_attention`.

On CUDA `store_kv` and `decode_attention` launch Triton kernels (`ops/triton/store_kv.py` and
`decode.py`).

The KV cache of a layer is two tensors ``[num_blocks, block_size, Hkv, D]``. A request's tokens
lie in the blocks of its row of `block_tables`; block 0 belongs to nobody and takes what padding
rows write. A step's rows come in two parts: first the decode rows (one token a request), whose
shapes depend on no data, so that they can be frozen in a graph; then the prefill tokens, whose
lengths are explicit ints.

Legend: T tokens, R requests, Hq query heads, Hkv key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from minilora.ops.launch_op import launch_op
from minilora.ops.triton import HAS_TRITON


@launch_op("minilora::store_kv", fake=lambda *_: None, mutates_args=("k_cache", "v_cache"))
def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the keys and values of T tokens, ``[T, Hkv, D]``, to their KV slots.

    `slot_mapping` ``[T]`` holds ``block * block_size + offset``; 0 (in block 0) for padding
    rows, so that they never touch a live entry (a -1 would be the last slot of the pool).
    """
    slots = slot_mapping.long()
    # A view, so that a cache with gaps is refused and not copied; index_copy_ refuses a -1.
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v.to(v_cache.dtype))


@launch_op("minilora::decode_attention", fake=lambda q, *_: q.new_empty(q.shape))
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """Attend from one new token of each request to all of its context.

    Args:
        q: ``[R, Hq, D]``.
        k_cache: ``[num_blocks, block_size, Hkv, D]``; `v_cache` alike.
        v_cache: as `k_cache`.
        block_tables: int32 ``[R, blocks]``, the blocks of each request; 0 where it has none.
        context_lens: int32 ``[R]``, tokens of the context, the new one included. A padding
            row has 0 and gets zeros.
        max_context_len: at least the largest of `context_lens`; in a graph, the largest
            that any replay may have.
        scale: multiplies the scores.

    Returns:
        ``[R, Hq, D]``. What lies in blocks that a request does not own, or beyond its context
        in its last block, has no influence, not even a NaN.
    """
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    position = torch.arange(max_context_len, device=q.device)
    owned = position < context_lens[:, None]  # [R, L]
    # 0 x NaN is NaN, so a mask over the scores is not enough: a row never reads what it does not
    # own, but its own first token instead.
    read = torch.where(owned, position, 0)
    slots = block_tables.long().gather(1, read // block_size) * block_size + read % block_size
    keys, values = (_tokens(cache, slots).to(q.dtype) for cache in (k_cache, v_cache))
    # A row of length 0 has no first token: it attends to one, so that its softmax is defined.
    allowed = (owned | (position == 0))[:, None, None, :]  # [R, 1, 1, L]
    grouped = q.unflatten(1, (kv_heads, -1))  # [R, Hkv, G, D]: the heads of a group as rows
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed, scale=scale)
    return torch.where(context_lens[:, None, None] > 0, out.flatten(1, 2), 0.0)


def _tokens(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return ``[R, Hkv, L, D]``: the tokens at `slots` ``[R, L]`` of a layer's keys or values."""
    rows = cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)


@launch_op("minilora::prefill_attention", fake=lambda q, *_: torch.empty_like(q))
def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend from a run of new tokens of each request to all of its context, causally.

    Args:
        q: ``[T, Hq, D]``, the requests' new tokens one after another.
        k_cache: ``[num_blocks, block_size, Hkv, D]``; `v_cache` alike.
        v_cache: as `k_cache`.
        block_tables: int32 ``[R, blocks]``.
        query_lens: new tokens of each request (a chunk of a prompt, say).
        context_lens: tokens of each context, the new ones included.
        scale: multiplies the scores.

    Returns:
        ``[T, Hq, D]``.

    Raises:
        ValueError: the lengths describe another number of rows than `q` has, or a context
            shorter than its new tokens.
    """
    if q.shape[0] != sum(query_lens):
        raise ValueError(
            f"prefill_attention got {q.shape[0]} rows, but query_lens describe {sum(query_lens)}"
        )
    out = torch.empty_like(q)
    start = 0
    lengths = zip(query_lens, context_lens, strict=True)
    for request, (query_len, context_len) in enumerate(lengths):
        if query_len > context_len:
            raise ValueError(
                f"prefill_attention got {query_len} new tokens in a context of {context_len}, "
                "which must include them"
            )
        rows = slice(start, start + query_len)
        blocks = block_tables[request, : -(-context_len // k_cache.shape[1])].long()
        keys = k_cache[blocks].flatten(0, 1)[:context_len]  # [L, Hkv, D]
        values = v_cache[blocks].flatten(0, 1)[:context_len]
        out[rows] = _causal_attention(q[rows], keys, values, scale)
        start += query_len
    return out


def _causal_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request: q ``[N, Hq, D]`` are the last N of the L tokens of keys and values."""
    new, context, kv_heads = q.shape[0], keys.shape[0], keys.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, N, D]
    group = grouped.shape[1]
    keys = keys.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1)  # [Hkv, G, L, D]
    values = values.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    # The last token sees the whole context. On CUDA a kernel knows this shape: no mask is made.
    causal = causal_lower_right(new, context)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=causal, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)  # [N, Hq, D]


if HAS_TRITON:

    @torch.library.impl("minilora::store_kv", "cuda")
    def _store_kv_on_cuda(
        k: torch.Tensor, v: torch.Tensor, *caches_and_slots: torch.Tensor
    ) -> None:
        from minilora.ops.triton import store_kv as kernel

        kernel.store_kv(k, v, *caches_and_slots)

    @torch.library.impl("minilora::decode_attention", "cuda")
    def _decode_on_cuda(q: torch.Tensor, *others: Any) -> torch.Tensor:
        from minilora.ops.triton.decode import decode

        return decode(q, *others)
