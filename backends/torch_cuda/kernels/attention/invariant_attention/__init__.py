"""Attention over the paged cache whose result for a token depends on its sequence alone (--batch-invariant)."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
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
from pagoda.backends.torch_decoder.functions import softcap as capped

__all__ = ["SequenceTokens", "invariant_attention", "query_tile", "span_tokens"]

QUERIES: Final = 16
KEYS: Final = 128
"""Rows and columns of the products of the plain torch definition."""

_NOTHING: Final = -1e30
"""A masked score: finite, so that the difference of two is not NaN."""


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
    for sequence, rows, end, real in tokens.spans():
        if end <= 0:
            out[rows] = 0
            continue
        positions = torch.arange(end - (rows.stop - rows.start), end)
        first = 0 if rules.window is None else max(0, end - real - rules.window + 1)
        caches = (keys, k_scale), (values, v_scale)
        k, v = (_tiles(gather(cache, tables[sequence], first, end).float() * by, first) for cache, by in caches)
        for begin in range(rows.start, rows.stop, QUERIES):
            part = slice(begin, min(begin + QUERIES, rows.stop))
            at = positions[part.start - rows.start : part.stop - rows.start]
            out[part] = _attend_tiles(q[part], at, k, v, first // KEYS * KEYS, rules).to(out.dtype)
    return out


def _tiles(array: Tensor, start: int) -> tuple[Tensor, ...]:
    """Return K or V [K, length, H] of positions from `start` as tiles [K, KEYS, H], with zeros around."""
    before = start % KEYS
    return F.pad(array, (0, 0, before, -(before + array.shape[1]) % KEYS)).split(KEYS, 1)


def _attend_tiles(
    q: Tensor,
    positions: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    begin: int,
    rules: ScoreRules,
) -> Tensor:
    """Return float32 [t, N, V] of q [t, N, H] at positions [t] over tiles [K, KEYS, H or V] from position `begin`."""
    count, heads, dim = q.shape
    kv_heads = keys[0].shape[0]
    padding = QUERIES - count
    rows = F.pad(q.float(), (0, 0, 0, 0, 0, padding)).view(QUERIES, kv_heads, -1, dim).permute(1, 2, 0, 3)
    at = F.pad(positions, (0, padding), value=-1)[:, None]
    by_head = (kv_heads, heads // kv_heads, 1, 1)
    scores = []
    for index, tile in enumerate(keys):
        behind = at - torch.arange(begin + index * KEYS, begin + (index + 1) * KEYS)
        score = torch.matmul(rows.flatten(1, 2), tile.mT).view(*by_head[:2], QUERIES, KEYS) * rules.scale
        score = score if rules.softcap is None else capped(score, rules.softcap)
        if rules.slopes is not None:
            score = score - rules.slopes.view(by_head) * (behind.clamp(min=0).sqrt() if rules.root else behind)
        seen = behind >= 0 if rules.window is None else (behind >= 0) & (behind < rules.window)
        scores.append(score.masked_fill(~seen, _NOTHING))
    top = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    total = torch.zeros_like(top)
    mixed = rows.new_zeros(*rows.shape[:3], values[0].shape[2])
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(by_head)
        top = top.maximum(sinks)
        total = (sinks - top).exp()
    for score, value in zip(scores, values):
        weights = (score - top).exp().masked_fill(score == _NOTHING, 0)
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + torch.matmul(weights.flatten(1, 2), value).view(mixed.shape)
    heads_first = mixed / total.where(total > 0, 1)
    return heads_first.permute(2, 0, 1, 3)[:count].flatten(1, 2)
