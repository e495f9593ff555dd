"""Grouped-query attention to the blocks of tokens that an indexer selects, over the paged caches.

Axis letters: T tokens, C cached tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, Projection
from pagoda.backends.reference.model.mixers.rotary import Rotations, rotation_of
from pagoda.backends.torch_decoder.functions import norm
from pagoda.backends.torch_decoder.mixers.indexer import BlockSelector, IndexProjection
from pagoda.common.models.mixers import Attention, BlockIndexer


def block_index(spec: BlockIndexer, attention: Attention, params: AttentionParams) -> BlockSelector:
    """Return one layer's indexer."""
    own = params.blocks
    assert own is not None, "the weights are complete"
    project = IndexProjection(
        q=own.q,
        k=own.k,
        q_norm=lambda x: norm(x, spec.norm, own.q_norm),
        k_norm=lambda x: norm(x, spec.norm, own.k_norm),
        heads=attention.kv_heads,
    )
    return BlockSelector(spec, project)


class PagedBlockAttention:
    """One layer's attention over the paged caches."""

    def __init__(self, spec: Attention, params: AttentionParams, caches: tuple[int, ...]) -> None:
        """`caches`: the numbers of the cache of keys and values, and of that of the indexer's keys."""
        self.spec = spec
        self.project = Projection(spec, params)
        assert spec.blocks is not None, "the mixer has an indexer"
        self.index = block_index(spec.blocks, spec, params)
        self.number, self.index_number = caches
        self.group = spec.heads // spec.kv_heads

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        queries, keys, values = self.project(x, rotations[self.spec.rope])
        rotate = rotation_of(rotations, self.index.spec.rope)
        index_queries = self.index.project.queries(x, rotate)
        index_keys = self.index.project.keys(x, rotate)
        cache = caches[self.number]
        index = caches[self.index_number]
        view = batch.views[cache.view]
        index_view = batch.views[index.view]
        for cached, new in zip(cache.arrays, (keys, values)):
            cached.index_copy_(1, view.write_slots, new.transpose(0, 1))
        index.arrays[0].index_copy_(1, index_view.write_slots, index_keys[None])
        out = torch.empty(len(x), self.spec.heads * self.spec.value_width, dtype=queries.dtype)
        for sequence, span, index_span in zip(batch.sequences, view.spans, index_view.spans):
            rows = slice(sequence.begin, sequence.end)
            seen = self.index.seen(index_queries[rows], index_span.read(index.arrays[0])[0], sequence.context)
            k, v, mask = (
                part.repeat_interleave(self.group, 0) for part in (*(span.read(a) for a in cache.arrays), seen)
            )
            mixed = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None], k[None], v[None], attn_mask=mask[None], scale=self.spec.scale
            )
            out[rows] = mixed[0].transpose(0, 1).flatten(1)
        return self.project.out(out, x)
