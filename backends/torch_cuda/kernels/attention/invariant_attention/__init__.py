"""Attention over the paged cache whose result for a token depends on its sequence alone (--batch-invariant)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import kernel
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention.kernel import (
    SequenceTokens,
    query_tile,
    span_tokens,
)
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import check_caches, gather
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_decoder.mixers.invariant_attention import KEYS, QUERIES, TileRules, attend_tiles, in_tiles

__all__ = ["SequenceTokens", "invariant_attention", "query_tile", "span_tokens"]


def invariant_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tokens: SequenceTokens,
    rules: ScoreRules,
    *,
    span: int,
    workers: int | None = None,
    out: Tensor | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return softmax attention [T, N, V] of q [T, N, H] over the cached keys [P, K, B, H] and values [P, K, B, V].

    A token sees its sequence up to itself, with `rules.window` the last positions of it. Head n reads KV
    head n // (N/K). tables int32 [S, W]; `tokens`: which rows of q are computed, and where they stand. Rows that are
    not computed are unchanged in `out` (undefined by default). A token's result is the same bits in decodes and
    prefills, in whatever chunk, for every number of sequences and `workers`: programs per sequence and head of a
    decode, chosen if None. It depends on `span` (`span_tokens`). Keys and values have q's type, or float8_e4m3fn with
    scales. Raise ValueError for other types or shapes.
    """
    out = torch.empty(*q.shape[:2], values.shape[3], dtype=q.dtype, device=q.device) if out is None else out
    _check(q, out, keys, values, rules)
    if not use_kernel:
        return invariant_attention_reference(q, keys, values, tables, tokens, rules, out)
    return kernel.launch(q, keys, values, tables, tokens, rules, span, workers, out, chip)


def _check(q: Tensor, out: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules) -> None:
    scaled = keys.dtype == torch.float8_e4m3fn
    if scaled == (rules.k_scale is None) or scaled == (rules.v_scale is None) or not (scaled or keys.dtype == q.dtype):
        raise ValueError(f"{keys.dtype} keys and values do not fit {q.dtype} queries, or lack scales")
    check_caches(keys, values)
    if q.shape[1] % keys.shape[1] or q.shape[2] != keys.shape[3] or out.shape != (*q.shape[:2], values.shape[3]):
        raise ValueError(f"queries {tuple(q.shape)} or results {tuple(out.shape)} do not fit keys {tuple(keys.shape)}")
    if any(x.stride()[-2:] != (x.shape[-1], 1) for x in (q, out, keys, values)):
        raise ValueError("heads of q and out and tokens of a page must be contiguous")


def invariant_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tokens: SequenceTokens, rules: ScoreRules, out: Tensor
) -> Tensor:
    """Multiply QUERIES rows and KEYS keys at a time, in float32; tiles of keys begin at multiples of KEYS."""
    k_scale, v_scale = (1.0 if x is None else x.item() for x in (rules.k_scale, rules.v_scale))
    tiles = TileRules(rules.scale, rules.window, rules.softcap, rules.sinks, rules.slopes, rules.root)
    for sequence, rows, end, real in tokens.spans():
        if end <= 0:
            out[rows] = 0
            continue
        positions = torch.arange(end - (rows.stop - rows.start), end)
        first = 0 if rules.window is None else max(0, end - real - rules.window + 1)
        caches = (keys, k_scale), (values, v_scale)
        k, v = (in_tiles(gather(cache, tables[sequence], first, end).float() * by, first) for cache, by in caches)
        for begin in range(rows.start, rows.stop, QUERIES):
            part = slice(begin, min(begin + QUERIES, rows.stop))
            queries_at = positions[part.start - rows.start : part.stop - rows.start]
            out[part] = attend_tiles(q[part], queries_at, k, v, first // KEYS * KEYS, tiles).to(out.dtype)
    return out
