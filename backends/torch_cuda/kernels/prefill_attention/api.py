"""Attention of prefill and mixed steps: the one entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.prefill_attention.kernel import kernel
from pagoda.backends.torch_cuda.kernels.prefill_attention.reference import reference
from pagoda.backends.torch_cuda.kernels.prefill_attention.rules import Rules
from pagoda.backends.torch_cuda.kernels.prefill_attention.tiles import query_tile


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    tile: int | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Softmax attention of q [T, N, H] over the cached keys and values [P, K, B, H]: [T, N, H].

    Token j of sequence s is q[query_start[s] + j], at position kv_lens[s] - (its query tokens) + j; it sees positions
    up to its own, with `window` only the last so many of them. Head n reads KV head n // (N/K). tables int32 [S, W];
    query_start int32 [S+1]; kv_lens int32 [S], query tokens included, whose K and V are in the cache already.
    tiles int32 [n, 2]: what `make_tiles` made for `tile` tokens (default: `query_tile`). Sequences without a tile are
    not computed: their rows, and rows of no sequence, keep what `out` [T, N, H] held (undefined where it is made here).
    softcap: scores become cap * tanh(score / cap); sinks [N]: a logit per head that takes part in the softmax and has
    no value; k_scale, v_scale float32 [1], for float8_e4m3fn keys and values: value = stored * scale.
    The reference takes queries of any type, float64 for one.
    ValueError: types or shapes that do not fit together.
    """
    out = torch.empty_like(q) if out is None else out
    _check(q, out, keys, values)
    scaled = keys.dtype == torch.float8_e4m3fn
    if scaled == (k_scale is None) or scaled == (v_scale is None):
        raise ValueError(f"{keys.dtype} keys and values {'need' if scaled else 'have no'} k_scale and v_scale")
    rules = Rules(scale, window, softcap, sinks, k_scale, v_scale)
    if not use_kernel:
        return reference(q, keys, values, tables, query_start, kv_lens, tiles, out, rules)
    if keys.dtype != q.dtype and not scaled:
        raise ValueError(f"queries are {q.dtype}, keys {keys.dtype}")
    size = query_tile(q.shape[1] // keys.shape[1], q.shape[2], q.dtype, chip) if tile is None else tile
    return kernel(q, keys, values, tables, query_start, kv_lens, tiles, out, rules, size, chip)


def _check(q: Tensor, out: Tensor, keys: Tensor, values: Tensor) -> None:
    """ValueError for what the kernel would read wrongly."""
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.stride() != values.stride():
        raise ValueError("keys and values differ in shape, type or strides")
    if q.shape[1] % keys.shape[1] or q.shape[2] != keys.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(keys.shape)}")
    if any(x.stride()[-2:] != (x.shape[-1], 1) for x in (q, out, keys, values)):
        raise ValueError("heads of a query or an output, or tokens of a page, are not next to each other")
