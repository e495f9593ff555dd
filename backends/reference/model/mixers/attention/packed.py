"""Grouped-query attention within each prompt of a step, without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, Projection, score_bias
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.torch_decoder.functions import query_growth, softcap, softmax
from pagoda.common.models.mixers import Attention

QUERIES: Final = 256
"""Queries whose attention scores are materialised at a time."""

NO_MASKS: Final[Mapping[int, Tensor]] = {}

SharedCaches = dict[int, tuple[Tensor, Tensor]]
"""K and V [T, K, H] of one step that later layers read, by the number of the cache (see ModelSpec.cache_numbers)."""


class PackedAttention:
    """One layer's attention within each prompt."""

    def __init__(self, spec: Attention, params: AttentionParams, shared: int | None) -> None:
        """`shared`: the number of its cache if several layers read it."""
        self.spec = spec
        self.project = Projection(spec, params)
        self.shared = shared

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, shared: SharedCaches) -> Tensor:
        """X [T, D] -> [T, D]."""
        rotation = rotations[self.spec.rope]
        if self.spec.shares_cache_of is not None:
            assert self.shared is not None, "two layers read the cache"
            queries = self.project.queries(x, rotation)
            keys, values = shared[self.shared]
        else:
            queries, keys, values = self.project(x, rotation)
            if self.shared is not None:
                shared[self.shared] = keys, values
        if self.spec.query_growth is not None:
            queries = queries * query_growth(self.spec.query_growth, batch.positions).to(queries.dtype)
        sinks = self.project.params.sinks
        return self.project.out(attend(queries, keys, values, batch, self.spec, sinks=sinks), x)


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
