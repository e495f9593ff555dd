"""The definition, in plain torch: the kernel's oracle, and what runs where no GPU is.

Computes in float32, or in float64 when q is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.ops import softcap as capped


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
