"""Attention of many query tokens per sequence over the paged cache: prefill, chunked prefill and mixed steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import kernel
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import make_tiles, query_tile
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import NO_SEQUENCE
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings
from pagoda.backends.torch_decoder.functions import softcap as capped

__all__ = ["PagedPrefill", "make_tiles", "prefill_attention", "query_tile"]


class PagedPrefill:
    """Attention of many query tokens per sequence over one cache: keys [P, K, B, H] and values [P, K, B, V].

    Cache, sinks, slopes and scales stay where they are. `group`: query heads per KV head; head n reads KV head n //
    group. `tile`: tokens of the tiles. `dtype`: of queries, that of the cache unless it is float8; plain torch takes
    any, e.g. float64. Raise ValueError for caches that do not fit.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        rules: ScoreRules,
        *,
        dtype: torch.dtype,
        group: int,
        tile: int | None = None,
        use_kernel: bool,
        chip: Chip,
        chosen: Settings | None = None,
    ) -> None:
        """`tile`: default `query_tile`. `chosen`: settings on trial."""
        check_caches(keys, values)
        if any(x.stride()[-2:] != (x.shape[-1], 1) for x in (keys, values)):
            raise ValueError("tokens of a page must be contiguous")
        scaled = keys.dtype == torch.float8_e4m3fn
        if scaled == (rules.k_scale is None) or scaled == (rules.v_scale is None):
            raise ValueError(f"{keys.dtype} keys and values {'need' if scaled else 'have no'} k_scale and v_scale")
        self.keys = keys
        self.values = values
        self.rules = rules
        self._heads = group * keys.shape[1], keys.shape[3]
        self._results = group * keys.shape[1], values.shape[3]
        self._dtype = dtype
        self._launch: kernel.PrefillLaunch | None = None
        if use_kernel:
            if keys.dtype != dtype and not scaled:
                raise ValueError(f"queries are {dtype}, keys {keys.dtype}")
            tile = query_tile(group, keys.shape[3], dtype, chip) if tile is None else tile
            self._launch = kernel.PrefillLaunch(keys, values, rules, dtype, group, tile, chip, chosen)

    def __call__(
        self, q: Tensor, tables: Tensor, query_start: Tensor, kv_lens: Tensor, tiles: Tensor, out: Tensor
    ) -> Tensor:
        """Write softmax attention of q [T, N, H] to `out` [T, N, V] and return it.

        Token j of sequence s is q[query_start[s] + j], at position kv_lens[s] - (its query tokens) + j. tables int32
        [S, W]; query_start int32 [S+1]; kv_lens int32 [S], query tokens included, whose K and V are in the cache
        already. tiles int32 [n, 2]: from `make_tiles`, unused ones -1. Sequences without a tile are not computed: their
        rows, and rows of no sequence, are unchanged. Raise ValueError for other types or shapes.
        """
        if q.shape[1:] != self._heads or out.shape[1:] != self._results or q.dtype != self._dtype:
            raise ValueError(f"{q.dtype} queries {tuple(q.shape)} or results {tuple(out.shape)} do not fit the cache")
        if q.stride()[1:] != (self._heads[1], 1) or out.stride()[1:] != (self._results[1], 1):
            raise ValueError("heads of q and out must be contiguous")
        if self._launch is None:
            inputs = tables, query_start, kv_lens, tiles
            return prefill_attention_reference(q, self.keys, self.values, *inputs, out, self.rules)
        self._launch(q, tables, query_start, kv_lens, tiles, out)
        return out


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
    chunk: int | None = None,
    lookback: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    root: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    tile: int | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return attention [T, N, V] of q [T, N, H] by `PagedPrefill` over caches that are used once; see `ScoreRules`.

    `out` [T, N, V]: rows that are not computed are unchanged in it, undefined by default.
    """
    out = torch.empty(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device) if out is None else out
    rules = ScoreRules(scale, window, softcap, sinks, slopes, k_scale, v_scale, chunk, lookback, root)
    attend = PagedPrefill(
        keys,
        values,
        rules,
        dtype=q.dtype,
        group=q.shape[1] // keys.shape[1],
        tile=tile,
        use_kernel=use_kernel,
        chip=chip,
    )
    return attend(q, tables, query_start, kv_lens, tiles, out)


def check_caches(keys: Tensor, values: Tensor) -> None:
    """Raise ValueError if keys and values do not fit each other."""
    if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        raise ValueError("keys and values differ in heads, pages or type")
    if keys.shape == values.shape and keys.stride() != values.stride():
        raise ValueError("keys and values differ in strides")


def prefill_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    tiles: Tensor,
    out: Tensor,
    rules: ScoreRules,
) -> Tensor:
    """Compute every sequence that has a tile; write and return `out` [T, N, V].

    Rounds as the reference backend does; float64 queries stay float64.
    """
    starts = query_start.tolist()
    lens = kv_lens.tolist()
    window = rules.window
    chunk = rules.chunk
    k_scale, v_scale = (1.0 if x is None else x.item() for x in (rules.k_scale, rules.v_scale))
    for s in sorted(set(tiles[:, 0].tolist()) - {NO_SEQUENCE}):
        rows = slice(starts[s], starts[s + 1])
        end = lens[s]
        context = end - (rows.stop - rows.start)
        first = 0 if window is None else max(0, context - window + 1)
        first = first if chunk is None else max(0, context // chunk * chunk - rules.lookback)
        k, v = (gather(cache, tables[s], first, end).to(q.dtype) for cache in (keys, values))
        seen = visible(context, end, first, window, q.device, chunk, rules.lookback)
        out[rows] = attend(q[rows], k, v, seen, rules, k_scale) * v_scale
    return out


def gather(cache: Tensor, table: Tensor, start: int, end: int) -> Tensor:
    """Return positions [start, end) of a sequence from a cache [P, K, B, H]: [K, end - start, H]."""
    size = cache.shape[2]
    first = start // size
    pages = cache[table[first : -(-end // size)].long()].transpose(0, 1).flatten(1, 2)
    return pages[:, start - first * size : end - first * size]


def visible(
    context: int,
    end: int,
    start: int,
    window: int | None,
    device: torch.device,
    chunk: int | None = None,
    lookback: int = 0,
) -> Tensor | None:
    """Return bool [end - context, end - start]: the positions from `start` that tokens from position `context` see.

    None: token t sees positions up to t, which torch computes faster.
    """
    if context == 0 and end <= (window or chunk or end):
        return None
    query = torch.arange(context, end, device=device)[:, None]
    key = torch.arange(start, end, device=device)[None]
    seen = key <= query
    if window is not None:
        return seen & (key > query - window)
    return seen if chunk is None else seen & (key >= query // chunk * chunk - lookback)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, rules: ScoreRules, k_scale: float) -> Tensor:
    """Return attention [T, N, V] of q [T, N, H] over k [K, C, H], v [K, C, V] where `seen` (see `visible`) allows."""
    scale = rules.scale * k_scale
    softcap = rules.softcap
    sinks = rules.sinks
    group = q.shape[1] // k.shape[0]
    q = q.transpose(0, 1)
    k = k.repeat_interleave(group, 0)
    v = v.repeat_interleave(group, 0)
    if softcap is None and sinks is None and rules.slopes is None:
        batch = (q[None], k[None], v[None])
        out = F.scaled_dot_product_attention(*batch, attn_mask=seen, is_causal=seen is None, scale=scale)
        return out[0].transpose(0, 1)
    scores = (q @ k.mT) * scale
    scores = scores if softcap is None else capped(scores, softcap)
    if rules.slopes is not None:
        query = torch.arange(scores.shape[2] - scores.shape[1], scores.shape[2], device=q.device)
        behind = query[:, None] - torch.arange(scores.shape[2], device=q.device)
        distance = behind.clamp(min=0).to(scores.dtype).sqrt() if rules.root else behind
        scores = scores - rules.slopes.to(scores.dtype)[:, None, None] * distance
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if seen is None else seen
    scores = scores.masked_fill(~seen, float("-inf")).to(torch.promote_types(q.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(seen), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights.to(v.dtype) @ v).transpose(0, 1)
