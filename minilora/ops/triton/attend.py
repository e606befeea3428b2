# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What one program of decode attention does: attend to the tokens ``start <= n < stop``.

Both forms keep a running softmax and return, for each query head of the program, the largest
score (times log2 e), the sum of the weights and the weighted sum of the values, not divided yet.

`attend_with_group` is for several query heads that share a KV head: two matrix products a tile.
`attend_with_one` is for a single one, where a matrix product would be 15/16 padding: multiply
and add, and no exchange between tokens before the end.

A token's block is looked up in its request's row of the block tables. What lies at or past
`stop` is not loaded: it may be NaN, and 0 x NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every score, but finite: -inf minus -inf would be NaN where no token came yet.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def attend_with_one(
    q_row, k_head, v_head, table, start, stop, scale, k_block, k_token, v_block, v_token,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return best [1], total [1] and acc [1, BLOCK_D] of one query head.

    Each of the BLOCK_N places in a tile has a softmax of its own, so that tokens meet only once,
    after the loop. Inside of it only the threads of one token add up.
    """
    d = tl.arange(0, BLOCK_D)
    real = d < D
    q_width = tl.where(start < stop, D, 0)  # nothing is loaded for a padding row
    q = tl.load(q_row + d, mask=d < q_width, other=0.0).to(tl.float32) * scale
    best = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < stop
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        k_rows = k_head + block * k_block + (n % BLOCK_SIZE) * k_token
        v_rows = v_head + block * v_block + (n % BLOCK_SIZE) * v_token
        mask = inside[:, None] & real[None, :]
        k = tl.load(k_rows[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_rows[:, None] + d[None, :], mask=mask, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1)
        score = tl.where(inside, score, float("-inf"))
        new_best = tl.maximum(best, score)
        keep, weight = tl.exp2(best - new_best), tl.exp2(score - new_best)
        total = total * keep + weight
        acc = acc * keep[:, None] + weight[:, None] * v.to(tl.float32)
        best = new_best
    top = tl.max(best, 0, keep_dims=True)
    share = tl.exp2(best - top)
    total = tl.sum(total * share, 0, keep_dims=True)
    return top, total, tl.sum(acc * share[:, None], 0, keep_dims=True)


@triton.jit
def attend_with_group(
    q_rows, mine, k_head, v_head, table, start, stop, scale, k_block, k_token, v_block, v_token,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return best [BLOCK_G], total [BLOCK_G] and acc [BLOCK_G, BLOCK_D] of some query heads."""
    d = tl.arange(0, BLOCK_D)
    real = d < D
    q_width = tl.where(start < stop, D, 0)  # nothing is loaded for a padding row
    q_mask = mine[:, None] & (d < q_width)[None, :]
    q = tl.load(q_rows[:, None] + d[None, :], mask=q_mask, other=0.0)
    if EXACT:
        q = q.to(tl.float32)
    best = tl.full((BLOCK_G,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < stop
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        k_rows = k_head + block * k_block + (n % BLOCK_SIZE) * k_token
        v_rows = v_head + block * v_block + (n % BLOCK_SIZE) * v_token
        # K^T comes by its addresses, [d, n].
        k_mask, v_mask = inside[None, :] & real[:, None], inside[:, None] & real[None, :]
        k = tl.load(k_rows[None, :] + d[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_rows[:, None] + d[None, :], mask=v_mask, other=0.0)
        if EXACT:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        keep, weight = tl.exp2(best - new_best), tl.exp2(score - new_best[:, None])
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc
