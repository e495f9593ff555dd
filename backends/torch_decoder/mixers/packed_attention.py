"""Softmax attention within each prompt of a step, without a cache, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.functions import alibi, softcap, softmax
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import Attention

QUERIES: Final = 256
"""Queries whose attention scores are materialised at a time."""

NO_MASKS: Final[Mapping[int, Tensor]] = {}

SharedCaches = dict[int, tuple[Tensor, Tensor]]
"""K and V [T, K, H] of one step that later layers read, by the number of the cache (see ModelSpec.cache_numbers)."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PackedPrompts,
    spec: Attention,
    masks: Mapping[int, Tensor] = NO_MASKS,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention within each prompt: queries [T, N, H], keys [T, K, H], values [T, K, V] -> [T, N*V].

    `masks`: by length, bool [n, 1, length, length] in place of what the spec lets a token see. `sinks` [N].
    """
    out = queries.new_empty(*queries.shape[:2], values.shape[-1])
    repeats = spec.heads // spec.kv_heads
    for group in batch.groups:
        q = group.take(queries)
        k = group.take(keys)
        v = group.take(values)
        if repeats > 1:
            k = k.repeat_interleave(repeats, 1)
            v = v.repeat_interleave(repeats, 1)
        if (mask := masks.get(group.length)) is None:
            mixed = _attend(q, k, v, batch, spec, sinks).transpose(1, 2)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale).transpose(1, 2)
        out[group.rows] = mixed[0] if isinstance(group.rows, slice) else mixed
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: PackedPrompts, spec: Attention, sinks: Tensor | None) -> Tensor:
    """Softmax attention of q, k, v [n, N, length, H]."""
    length = q.shape[2]
    mask = batch.mask(
        length,
        causal=spec.causal,
        window=spec.window,
        chunk=spec.chunk,
        chunk_lookback=spec.chunk_lookback,
    )
    if spec.alibi_slopes is not None:
        bias = score_bias(spec, length, length, q)
        bias = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=spec.scale)
    if spec.softcap is None and sinks is None:
        whole = mask is not None and spec.causal and (spec.window or spec.seen_chunks or length) >= length
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if whole else mask, is_causal=whole, scale=spec.scale
        )
    rows = [
        _explicit(q[:, :, at : at + QUERIES], k, v, None if mask is None else mask[at : at + QUERIES], spec, sinks)
        for at in range(0, length, QUERIES)
    ]
    return torch.cat(rows, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: Attention, sinks: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks, which torch's attention lacks."""
    scores = (q @ k.transpose(-1, -2)) * spec.scale
    scores = scores if spec.softcap is None else softcap(scores, spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(scores, None if sinks is None else sinks[:, None]).to(v.dtype) @ v


def score_bias(spec: Attention, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return what ALiBi adds to the scores; see `alibi`."""
    assert spec.alibi_slopes is not None, "the mixer has ALiBi"
    return alibi(spec.alibi_slopes, queries=queries, keys=keys, like=like, causal=spec.causal, root=spec.alibi_root)
