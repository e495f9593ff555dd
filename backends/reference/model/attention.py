"""Grouped-query attention over the paged cache.

Order within a layer: project, normalise, rotate, write K and V of *all* sequences, then attend (a sequence may share
blocks that another one fills in the same step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import CacheSpan, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.ops import deinterleave, norm, softcap
from pagoda.backends.reference.weights import AttentionParams
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, cos_sin
from pagoda.common.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates heads by the positions of one step's tokens; channel i of the first `dim` pairs with i + dim/2.

    cos and sin [T, 1, dim]; sin includes the sign of its half. Channels from `dim` on are not rotated. `interleaved`:
    channel 2i pairs with 2i + 1, and the result has them at i and i + dim/2.
    """

    cos: Tensor
    sin: Tensor
    dim: int
    interleaved: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, n, H] -> [T, n, H]."""
        if self.interleaved:
            x = deinterleave(x, self.dim)
        if self.dim == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(self.dim // 2, -1), self.sin)
        head, tail = x[..., : self.dim], x[..., self.dim :]
        rotated = torch.addcmul(head * self.cos, head.roll(self.dim // 2, -1), self.sin)
        return torch.cat((rotated, tail), -1)


Rotations = dict[Rope | None, Rotation | None]
"""The rotation of each Rope of the model in one step; None maps to None."""


class RotaryTables:
    """Tables of cos and sin [max_len, 1, dim] in the compute dtype, computed in float64, per distinct Rope."""

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype) -> None:
        positions = np.arange(max_len)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        for rope in spec.ropes:
            cos, sin = cos_sin(rope, max_len, positions)
            both = np.concatenate([cos, cos], -1)[:, None], np.concatenate([-sin, sin], -1)[:, None]
            self._tables[rope] = torch.from_numpy(both[0]).to(dtype), torch.from_numpy(both[1]).to(dtype)

    def at(self, positions: Tensor) -> Rotations:
        """Return the rotations at positions int64 [T]."""
        rotations: Rotations = {None: None}
        for rope, (cos, sin) in self._tables.items():
            rotations[rope] = Rotation(cos[positions], sin[positions], rope.dim, rope.interleaved)
        return rotations


class Projection:
    """One layer's projections around attention."""

    def __init__(self, spec: Attention, params: AttentionParams) -> None:
        self.spec, self.params = spec, params

    def __call__(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """X [T, D] -> queries [T, N, H], keys and values [T, K, H], normalised and rotated."""
        spec = self.spec
        projected = self.params.qkv(x).view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        heads = self._normalise(projected[:, : spec.heads + spec.kv_heads])
        if rotation is not None:
            heads = rotation(heads)
        return heads[:, : spec.heads], heads[:, spec.heads :], projected[:, spec.heads + spec.kv_heads :]

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """X [T, D] -> queries [T, N, H] of a mixer that reads another layer's K and V."""
        spec, q_norm = self.spec, self.params.q_norm
        queries = self.params.qkv(x).view(x.shape[0], spec.heads, spec.head_dim)
        if spec.qk_norm is not None and q_norm is not None:
            queries = self._normalise_part(queries, spec.qk_norm, q_norm)
        return queries if rotation is None else rotation(queries)

    def out(self, heads: Tensor, x: Tensor) -> Tensor:
        """Attended heads [T, N*H] and the layer's input x [T, D], of which the output gate is computed -> [T, D]."""
        gate = self.params.gate
        return self.params.out(heads if gate is None else heads * gate(x).sigmoid())

    def _normalise(self, heads: Tensor) -> Tensor:
        """Apply the QK norm, if any, to heads [T, N+K, H]."""
        spec, params = self.spec, self.params
        if spec.qk_norm is None or params.q_norm is None or params.k_norm is None:
            return heads
        parts = (heads[:, : spec.heads], params.q_norm), (heads[:, spec.heads :], params.k_norm)
        return torch.cat([self._normalise_part(h, spec.qk_norm, w) for h, w in parts], dim=1)

    def _normalise_part(self, heads: Tensor, spec: Norm, weight: Tensor) -> Tensor:
        if self.spec.qk_norm_over == "full":
            return norm(heads.flatten(1), spec, weight).view(heads.shape)
        return norm(heads, spec, weight)


class PagedAttention:
    """One layer's attention. N query heads, K KV heads, H head dim; head n reads KV head n // (N/K)."""

    def __init__(self, spec: Attention, params: AttentionParams, number: int) -> None:
        """`number`: of the cache that it reads."""
        self.spec, self.project, self.number = spec, Projection(spec, params), number
        self.group = spec.heads // spec.kv_heads

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        rotation, cache = rotations[self.spec.rope], caches[self.number]
        view = batch.views[cache.view]
        if self.spec.shares_cache_of is None:
            queries, keys, values = self.project(x, rotation)
            cached_keys, cached_values = cache.arrays
            cached_keys.index_copy_(1, view.write_slots, keys.transpose(0, 1))
            cached_values.index_copy_(1, view.write_slots, values.transpose(0, 1))
        else:
            queries = self.project.queries(x, rotation)
        return self.project.out(self._attend_all(queries, batch, view.spans, cache), x)

    def _attend_all(self, queries: Tensor, batch: StepBatch, spans: tuple[CacheSpan, ...], cache: LayerCache) -> Tensor:
        """Queries [T, N, H] -> [T, N*H], sequence by sequence."""
        if len(queries) == 1:
            return self._decode(queries[0], spans[0], cache).view(1, -1)
        out = torch.empty(len(queries), self.spec.heads * self.spec.head_dim, dtype=queries.dtype)
        for sequence, span in zip(batch.sequences[: batch.num_decodes], spans):
            out[sequence.begin] = self._decode(queries[sequence.begin], span, cache)
        for sequence, span in zip(batch.sequences[batch.num_decodes :], spans[batch.num_decodes :]):
            out[sequence.begin : sequence.end] = self._prefill(queries[sequence.begin : sequence.end], span, cache)
        return out

    def _decode(self, query: Tensor, span: CacheSpan, cache: LayerCache) -> Tensor:
        """One query token [N, H] -> [N*H]; the heads of a group are the rows of one product."""
        spec = self.spec
        q = query.view(1, spec.kv_heads, self.group, spec.head_dim)
        keys, values = (span.read(array)[None] for array in cache.arrays)
        return self._attend(q, keys, values, span).reshape(-1)

    def _prefill(self, queries: Tensor, span: CacheSpan, cache: LayerCache) -> Tensor:
        """Several query tokens [T, N, H] -> [T, N*H]: each sees the span up to itself, within the window."""
        keys, values = (span.read(array).repeat_interleave(self.group, 0)[None] for array in cache.arrays)
        return self._attend(queries.transpose(0, 1)[None], keys, values, span)[0].transpose(0, 1).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, span: CacheSpan) -> Tensor:
        """Softmax attention; q [1, n, T, H], k and v [1, n, C, H]; visibility from the span."""
        spec = self.spec
        if spec.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=span.mask, is_causal=span.causal, scale=spec.scale)
        scores = softcap((q @ k.transpose(-1, -2)) * spec.scale, spec.softcap)
        if span.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        elif span.mask is not None:
            scores = scores.masked_fill(~span.mask, float("-inf"))
        return scores.float().softmax(-1).to(v.dtype) @ v
