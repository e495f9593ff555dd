"""Attention of the last tokens of every sequence over its cached keys and values: the one entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import softcap as capped
from pagoda.backends.torch_cuda.kernels.launch import Chip

# The definition, in plain torch: the kernel's oracle, and what runs where no GPU is.
#
# Computes in float32, or in float64 when q is.


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """As `api.decode_attention`: q [S * query_len, N, H] -> [S * query_len, N, H]. Here keys may be of another type."""
    tokens, heads, dim = q.shape
    kv_heads, wide = keys.shape[1], torch.promote_types(q.dtype, torch.float32)
    if not len(kv_lens):
        return torch.empty_like(q)
    seen, slots = _seen(tables, kv_lens, query_len, window, keys.shape[2])  # [S, query_len, C], [S, C]
    k = _gather(keys, slots, k_scale, wide)  # [S, K, C, H]
    v = _gather(values, slots, v_scale, wide).masked_fill(~seen.any(1)[:, None, :, None], 0)
    rows = q.to(wide).view(-1, query_len, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3)
    scores = torch.matmul(rows, k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = capped(scores, softcap)
    scores = scores.unflatten(2, (query_len, -1)).masked_fill(~seen[:, None, :, None], float("-inf"))
    weights = _softmax(scores, sinks).flatten(2, 3)  # [S, K, query_len * N/K, C]
    out = torch.matmul(weights, v).unflatten(2, (query_len, -1)).transpose(1, 2).reshape(tokens, heads, dim)
    return out.masked_fill(~seen.any(-1).view(-1, 1, 1), 0).to(q.dtype)


def _seen(tables: Tensor, kv_lens: Tensor, query_len: int, window: int | None, page_size: int) -> tuple[Tensor, Tensor]:
    """Which of positions 0..C each token sees, bool [S, query_len, C], and where they are cached, int64 [S, C].

    C is the longest length. What no token sees is given the cache's first slot.
    """
    positions = torch.arange(max(int(kv_lens.max()), 1), device=kv_lens.device)
    last = kv_lens[:, None] - query_len + torch.arange(query_len, device=kv_lens.device)
    seen = positions <= last[..., None]
    if window is not None:
        seen &= positions > last[..., None] - window
    slots = tables[:, positions // page_size].long() * page_size + positions % page_size
    return seen, slots.masked_fill(~seen.any(1), 0)


def _gather(cache: Tensor, slots: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    """[S, K, C, H] of a cache [P, K, B, H] at slots [S, C]."""
    page_size = cache.shape[2]
    found = _indexable(cache)[slots // page_size, :, slots % page_size].view(cache.dtype)
    found = found.to(wide).transpose(1, 2)
    return found if scale is None else found * scale.to(wide)


def _indexable(cache: Tensor) -> Tensor:
    """Bytes in place of a float8, which torch does not index on every device."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Of scores [S, K, query_len, N/K, C], each head's sink [N] taking its share."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).view(1, scores.shape[1], 1, -1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


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


# How many programs share a sequence: fixed when a graph is captured, before any length is known.

PROGRAMS = 3
"""Programs that a multiprocessor runs at a time with the settings for one token and heads of up to 128."""

LEAST_TOKENS = 64
"""A split of fewer tokens costs more than it hides."""

LEAST_WAVES = 2
"""So that programs of short sequences make room for those of long ones. One sequence alone is shared out evenly."""

MOST_WAVES = 8
"""With more programs than that neither a wave that is not full nor one long sequence among short ones weighs much."""

ENOUGH = 0.95
"""Of the best filling of the chip: among such the fewest splits are taken."""


def choose_splits(seqs: int, kv_heads: int, max_len: int, chip: Chip) -> int:
    """Splits for so many sequences of at most max_len tokens: the last wave of programs fills the chip too.

    Lengths differ and change, splits do not: a sequence that is shorter leaves splits empty, which end at once.
    """
    slots, pairs = PROGRAMS * chip.sms, seqs * kv_heads
    most = max(1, min(-(-max_len // LEAST_TOKENS), MOST_WAVES * slots // pairs))
    least = max(1, min(most, min(seqs, LEAST_WAVES) * slots // pairs))

    def filled(splits: int) -> float:
        programs = pairs * splits
        return programs / (-(-programs // slots) * slots)

    best = max(map(filled, range(least, most + 1)))
    return next(splits for splits in range(least, most + 1) if filled(splits) >= ENOUGH * best)
