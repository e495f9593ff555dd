"""Grouped-query attention to the blocks of tokens that an indexer selects, over the paged caches and within prompts.

Axis letters: T tokens, C cached tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.mixers.attention.packed import attend
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, Projection
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.torch_decoder.functions import norm, select_blocks
from pagoda.common.models.mixers import Attention


class BlockIndex:
    """One layer's projections to the keys and queries that select blocks."""

    def __init__(self, spec: Attention, params: AttentionParams) -> None:
        assert spec.blocks is not None
        assert params.blocks is not None, "the weights are complete"
        self.spec = spec.blocks
        self.params = params.blocks
        self.heads = spec.kv_heads

    def __call__(self, x: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """X [T, D] -> queries [T, K, H], keys [T, H]."""
        spec = self.spec
        params = self.params
        rotate = rotations[self.spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        queries = norm(params.q(x).view(len(x), self.heads, -1), spec.norm, params.q_norm)
        keys = norm(params.k(x)[:, None], spec.norm, params.k_norm)
        return rotate(queries), rotate(keys)[:, 0]

    def seen(self, queries: Tensor, keys: Tensor, context: int) -> Tensor:
        """Return which of the keys [C, H] the queries [T, K, H] from position `context` on attend to, [K, T, C]."""
        scores = torch.einsum("tkh,ch->ktc", queries.float(), keys.float())
        return select_blocks(scores, self.spec, context)


class PagedBlockAttention:
    """One layer's attention over the paged caches."""

    def __init__(self, spec: Attention, params: AttentionParams, caches: tuple[int, ...]) -> None:
        """`caches`: the numbers of the cache of keys and values, and of that of the indexer's keys."""
        self.spec = spec
        self.project = Projection(spec, params)
        self.index = BlockIndex(spec, params)
        self.number, self.index_number = caches
        self.group = spec.heads // spec.kv_heads

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        queries, keys, values = self.project(x, rotations[self.spec.rope])
        index_queries, index_keys = self.index(x, rotations)
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


class PackedBlockAttention:
    """One layer's attention within each prompt."""

    def __init__(self, spec: Attention, params: AttentionParams) -> None:
        self.spec = spec
        self.project = Projection(spec, params)
        self.index = BlockIndex(spec, params)

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, *_: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        queries, keys, values = self.project(x, rotations[self.spec.rope])
        index_queries, index_keys = self.index(x, rotations)
        masks = {}
        for group in batch.groups:
            prompts = [self.index.seen(index_queries[rows], index_keys[rows], 0) for rows in group.prompts]
            masks[group.length] = torch.stack(prompts).repeat_interleave(self.spec.heads // self.spec.kv_heads, 1)
        return self.project.out(attend(queries, keys, values, batch, self.spec, masks), x)
