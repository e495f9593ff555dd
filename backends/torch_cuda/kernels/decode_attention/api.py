"""Attention of the last tokens of every sequence over its cached keys and values: the one entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.decode_attention.reference import reference

MAX_QUERY_LEN = 8


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    *,
    query_len: int = 1,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    splits: int,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """[T, N, H], of q's type: each token attends to its sequence up to itself.

    q [T, N, H], T = S * query_len: the tokens of sequence s are s * query_len + j, at positions
    kv_lens[s] - query_len + j; query_len 1 to 8. Head n reads KV head n // (N / K). keys, values [P, K, B, H], each
    page contiguous, B a power of two, K and V of these tokens written already; of q's type, or float8_e4m3fn that
    k_scale and v_scale (float32, one element) multiply. tables int32 [S, W], kv_lens int32 [S], at most W * B: both
    are read on the device, and no table entry or cache slot that no token sees is. kv_len 0 is padding, gives zeros.
    scale multiplies q.k. window: a token sees itself and the window - 1 before it. softcap: scores become
    softcap * tanh(scores / softcap). sinks [N]: a logit per head that takes part in the softmax and has no value.
    splits: programs that share a sequence's keys (`choose_splits`). use_kernel False: the torch reference.
    ValueError: shapes or types that do not fit together.
    """
    _check(q, keys, values, tables, kv_lens, query_len, sinks)
    if splits < 1:
        raise ValueError(f"splits is {splits}")
    if not use_kernel:
        return reference(
            q, keys, values, tables, kv_lens, query_len, scale, window, softcap, sinks, k_scale=k_scale, v_scale=v_scale
        )
    from pagoda.backends.torch_cuda.kernels.decode_attention.kernel import launch

    return launch(
        q, keys, values, tables, kv_lens, query_len, scale, window, softcap, sinks, k_scale, v_scale, splits, chip
    )


def _check(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, kv_lens: Tensor, query_len: int, sinks: Tensor | None
) -> None:
    if not 1 <= query_len <= MAX_QUERY_LEN:
        raise ValueError(f"query_len is {query_len}, not 1 to {MAX_QUERY_LEN}")
    if q.shape[0] != len(kv_lens) * query_len or tables.shape[0] != len(kv_lens):
        raise ValueError(f"q has {q.shape[0]} tokens, tables {tables.shape[0]} rows for {len(kv_lens)} sequences")
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[-1] != q.shape[-1]:
        raise ValueError(f"keys {keys.dtype} {keys.shape}, values {values.dtype} {values.shape}, q {q.shape}")
    page = keys.shape[2]
    if not q.is_contiguous() or tables.stride(-1) != 1 or not kv_lens.is_contiguous():
        raise ValueError("q, a row of tables and kv_lens must be contiguous")
    if keys.stride() != values.stride() or keys.stride()[1:] != (page * keys.shape[3], keys.shape[3], 1):
        raise ValueError(f"keys have strides {keys.stride()}, values {values.stride()}: pages are not contiguous")
    if page & (page - 1):
        raise ValueError(f"pages have {page} tokens, which is no power of two")
    if q.shape[1] % keys.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not share {keys.shape[1]} KV heads evenly")
    if tables.dtype != torch.int32 or kv_lens.dtype != torch.int32:
        raise ValueError(f"tables are {tables.dtype}, kv_lens {kv_lens.dtype}, not int32")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}, not one per head")
