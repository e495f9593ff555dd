"""Kernels that read and write a KV cache of more numbers than an int32 counts: offsets are 64 bits wide."""

from __future__ import annotations

import mmap

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles, prefill_attention
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import RopeCache
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS

HEADS, KV_HEADS, PAGE, HEAD_DIM = 4, 2, 4, 16
PAGES = 5
FAR = (1 << 31) // (KV_HEADS * PAGE * HEAD_DIM) + 7
"""The first page whose offset, in numbers, is past the range of an int32."""
NO_RESERVE = 0x4000
CHIP = CHIPS["sm_90"]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])


class FarCache:
    """A paged cache [P, KV_HEADS, PAGE, HEAD_DIM] of which two parts exist: `near`, its first pages, and `far`.

    The addresses before it are its own too, so that an offset that wraps around reads zeros and is no crash.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        page = KV_HEADS * PAGE * HEAD_DIM * dtype.itemsize
        behind = (FAR + PAGES) * page
        self._memory = mmap.mmap(-1, 2 * behind, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        self._dtype = dtype
        self.near, self.far = self._pages(behind), self._pages(behind + FAR * page)

    def _pages(self, offset: int) -> torch.Tensor:
        shape = PAGES, KV_HEADS, PAGE, HEAD_DIM
        count = PAGES * KV_HEADS * PAGE * HEAD_DIM * self._dtype.itemsize
        view = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=offset)
        return view.view(self._dtype).view(shape)


def random(*size: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def usual_and_far(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, FarCache]:
    """The same pages in a small cache and far behind in a large one."""
    usual, large = random(PAGES, KV_HEADS, PAGE, HEAD_DIM, seed=seed).to(dtype), FarCache(dtype)
    large.far.copy_(usual)
    return usual, large


def scales(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if dtype != torch.float8_e4m3fn:
        return {}
    return {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.5])}


def activations(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float8_e4m3fn else dtype


@dtypes
@pytest.mark.parametrize("pieces", [1, 2])
def test_decode_attention_reads_far_pages(dtype: torch.dtype, pieces: int) -> None:
    (keys, far_keys), (values, far_values) = usual_and_far(dtype, 1), usual_and_far(dtype, 2)
    q = random(2, HEADS, HEAD_DIM).to(activations(dtype))
    tables = torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32)
    kv_lens = torch.tensor([10, 3], dtype=torch.int32)
    how = {"scale": 0.25, "work": cut_evenly(kv_lens, pieces), "use_kernel": True, "chip": CHIP, **scales(dtype)}
    want = decode_attention(q, keys, values, tables, kv_lens, **how)
    assert torch.equal(decode_attention(q, far_keys.near, far_values.near, tables + FAR, kv_lens, **how), want)


@dtypes
def test_prefill_attention_reads_far_pages(dtype: torch.dtype) -> None:
    (keys, far_keys), (values, far_values) = usual_and_far(dtype, 1), usual_and_far(dtype, 2)
    lengths, kv_lens = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([10, 3], dtype=torch.int32)
    q = random(7, HEADS, HEAD_DIM).to(activations(dtype))
    query_start = torch.tensor([0, 4, 7], dtype=torch.int32)
    tables = torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32)
    tiles = torch.from_numpy(make_tiles(lengths.numpy(), 0, 2))
    rest = query_start, kv_lens, tiles
    how = {"scale": 0.25, "tile": 2, "use_kernel": True, "chip": CHIP, **scales(dtype)}
    want = prefill_attention(q, keys, values, tables, *rest, **how)
    assert torch.equal(prefill_attention(q, far_keys.near, far_values.near, tables + FAR, *rest, **how), want)


@dtypes
def test_keys_and_values_are_written_to_far_pages(dtype: torch.dtype) -> None:
    (keys, far_keys), (values, far_values) = usual_and_far(dtype, 1), usual_and_far(dtype, 2)
    qkv = random(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(activations(dtype))
    positions = torch.tensor([2, 0, 1], dtype=torch.int32)
    slots = torch.tensor([4 * PAGE + 3, PAGE, 2 * PAGE + 1], dtype=torch.int32)
    facts = {"heads": HEADS, "kv_heads": KV_HEADS, "cos_sin": random(3, 2, HEAD_DIM // 2), "use_kernel": True}
    facts |= {"q_norm": None, "k_norm": None, **scales(dtype)}
    before = keys.clone()
    RopeCache(keys, values, **facts)(qkv, positions, slots)
    RopeCache(far_keys.near, far_values.near, **facts)(qkv, positions, slots + FAR * PAGE)
    assert not torch.equal(keys.float(), before.float())
    assert torch.equal(far_keys.far.float(), keys.float())
    assert torch.equal(far_values.far.float(), values.float())
