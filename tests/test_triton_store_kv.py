"""The kernel that writes keys and values, against the plain body.

As in `test_triton_kernels`: on a GPU it runs as it is, on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from minilora.ops import attention
from tests.test_attention import DTYPES, strided_cache
from tests.triton_attention_cases import interpreter, run_under_the_interpreter
from tests.triton_cases import DEVICE, RUNS, kernels

if RUNS:
    from minilora.ops.triton.store_kv import store_kv


@interpreter
def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def new_kv(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """As the model has them: slices of a wider buffer."""
    qkv = torch.randn(rows, 9, 6, generator=torch.Generator().manual_seed(9)).to(dtype).to(DEVICE)
    return qkv[:, 3:6], qkv[:, 6:]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@kernels
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv_is_the_plain_body(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    k, v = new_kv(4, dtype)
    pools = torch.full((2, 5, 4, 3, 6), 3.0, dtype=dtype, device=DEVICE), ints(19, 4, 7, 8)
    want = [torch.full((5, 4, 3, 6), 3.0, dtype=dtype) for _ in range(2)]
    attention.store_kv(k.cpu(), v.cpu(), *want, pools[1].cpu())
    store_kv(k, v, *pools[0], pools[1].to(slot_dtype))
    assert torch.equal(pools[0].cpu(), torch.stack(want))


@kernels
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_store_kv_rounds_to_the_dtype_of_the_cache(cache_dtype: torch.dtype) -> None:
    k, v = new_kv(2)
    caches = torch.zeros(2, 3, 4, 3, 6, dtype=cache_dtype, device=DEVICE)
    store_kv(k, v, *caches, ints(5, 6))
    ulp = torch.finfo(cache_dtype).eps  # the interpreter truncates to bfloat16
    for cache, new in zip(caches, (k, v), strict=True):
        torch.testing.assert_close(cache.flatten(0, 1)[5:7].float(), new, rtol=ulp, atol=0)


@kernels
def test_many_padding_rows_write_to_slot_zero_only() -> None:
    k, v = new_kv(30)
    caches = torch.full((2, 3, 4, 3, 6), 3.0, device=DEVICE)
    store_kv(k, v, *caches, ints(5, *[0] * 29))
    for cache, new in zip(caches, (k, v), strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[5], new[0])
        assert any(torch.equal(flat[0], row) for row in new[1:])
        flat[5] = flat[0] = 3.0
        assert (cache == 3.0).all()


@kernels
@pytest.mark.parametrize("slot", [-1, 12, 1 << 30])
def test_a_slot_outside_of_the_pool_is_not_written(slot: int) -> None:
    storage = torch.full((2, 5, 4, 3, 6), 3.0, device=DEVICE)
    store_kv(*new_kv(2), *storage[:, 1:4], ints(slot, 4))  # something lies before and after
    assert (storage[:, 2, 0] != 3.0).all()
    storage[:, 2, 0] = 3.0
    assert (storage == 3.0).all()


@kernels
@pytest.mark.parametrize("layout", ["part of longer blocks", "heads first", "part of a width"])
def test_store_kv_into_strided_caches(layout: str) -> None:
    k, v = (x[:, :2] for x in new_kv(1))
    k_cache, v_cache = strided_cache(layout).to(DEVICE), torch.zeros(3, 4, 2, 6, device=DEVICE)
    for caches in ((k_cache, v_cache), (v_cache, k_cache)):
        store_kv(k, v, *caches, ints(6))
        assert torch.equal(caches[0][1, 2], k[0])
        assert torch.equal(caches[1][1, 2], v[0])


@kernels
def test_what_store_kv_refuses() -> None:
    k, v = new_kv(2)
    caches = torch.zeros(2, 3, 4, 3, 6, device=DEVICE)
    with pytest.raises(ValueError, match="3 slots for 2 tokens"):
        store_kv(k, v, *caches, ints(1, 2, 3))
    for new in ((k[:, :2], v[:, :2]), (k, v[:1])):
        with pytest.raises(ValueError, match="heads and widths"):
            store_kv(*new, *caches, ints(1, 2))
    with pytest.raises(ValueError, match="last must be 1"):
        store_kv(
            k, v, caches[0], caches[1].transpose(2, 3).contiguous().transpose(2, 3), ints(1, 2)
        )
