"""The definition: one sequence at a time, rounded as the reference backend rounds. Float64 queries stay float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.ops import softcap as capped
from pagoda.backends.torch_cuda.kernels.prefill_attention.rules import Rules


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    tiles: Tensor,
    out: Tensor,
    rules: Rules,
) -> Tensor:
    """As `api.prefill_attention`, for every sequence that has a tile. Writes and returns `out` [T, N, H]."""
    starts, lens = query_start.tolist(), kv_lens.tolist()
    window = rules.window
    k_scale, v_scale = (1.0 if x is None else x.item() for x in (rules.k_scale, rules.v_scale))
    for s in sorted(set(tiles[:, 0].tolist())):
        rows, end = slice(starts[s], starts[s + 1]), lens[s]
        context = end - (rows.stop - rows.start)
        first = 0 if window is None else max(0, context - window + 1)
        k, v = (gather(cache, tables[s], first, end).to(q.dtype) for cache in (keys, values))
        seen = visible(context, end, first, window, q.device)
        out[rows] = attend(q[rows], k, v, seen, rules.scale * k_scale, rules.softcap, rules.sinks) * v_scale
    return out


def gather(cache: Tensor, table: Tensor, start: int, end: int) -> Tensor:
    """Positions [start, end) of a sequence from a cache [P, K, B, H]: [K, end - start, H]."""
    size = cache.shape[2]
    first = start // size
    pages = cache[table[first : -(-end // size)].long()].transpose(0, 1).flatten(1, 2)
    return pages[:, start - first * size : end - first * size]


def visible(context: int, end: int, start: int, window: int | None, device: torch.device) -> Tensor | None:
    """Bool [end - context, end - start]: which positions from `start` each token from position `context` on sees.

    None: token t sees positions up to t, which torch has a faster way for.
    """
    if context == 0 and (window is None or end <= window):
        return None
    query, key = torch.arange(context, end, device=device)[:, None], torch.arange(start, end, device=device)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [T, N, H] over k, v [K, C, H] as far as `seen` (see `visible`) allows: [T, N, H]."""
    group = q.shape[1] // k.shape[0]
    q, k, v = q.transpose(0, 1), k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if softcap is None and sinks is None:
        batch = (q[None], k[None], v[None])
        out = F.scaled_dot_product_attention(*batch, attn_mask=seen, is_causal=seen is None, scale=scale)
        return out[0].transpose(0, 1)
    scores = (q @ k.mT) * scale
    scores = scores if softcap is None else capped(scores, softcap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if seen is None else seen
    scores = scores.masked_fill(~seen, float("-inf")).to(torch.promote_types(q.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(seen), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights.to(v.dtype) @ v).transpose(0, 1)
