"""Grouped-query attention within each prompt of a step, without a cache."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.model.mixers.attention.block_sparse import block_index
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, Projection
from pagoda.backends.reference.model.mixers.rotary import Rotations, rotation_of
from pagoda.backends.torch_decoder.functions import query_growth
from pagoda.backends.torch_decoder.mixers.packed_attention import SharedCaches, attend
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import Attention


class PackedAttention:
    """One layer's attention within each prompt."""

    def __init__(self, spec: Attention, params: AttentionParams, shared: int | None) -> None:
        """`shared`: the number of its cache if several layers read it."""
        self.spec = spec
        self.project = Projection(spec, params)
        self.index = None if spec.blocks is None else block_index(spec.blocks, spec, params)
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
        masks = {}
        if self.index is not None:
            rotate = rotation_of(rotations, self.index.spec.rope)
            masks = self.index.packed_masks(x, rotate, batch, self.spec.heads // self.spec.kv_heads)
        sinks = self.project.params.sinks
        return self.project.out(attend(queries, keys, values, batch, self.spec, masks, sinks=sinks), x)
