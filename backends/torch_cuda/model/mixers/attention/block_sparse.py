"""Grouped-query attention to the blocks of tokens that an indexer selects, over a paged cache.

A KV head's selected blocks are a sequence with a block table of its own, so decode attention computes prefills, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.block_selection import SelectedPages, select_pages
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import decode_attention, even_pieces
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import rotated
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaCache, CudaLayerCache
from pagoda.backends.torch_cuda.model.mixers.attention.paged import CudaAttention
from pagoda.backends.torch_cuda.model.mixers.interface import RotaryTables
from pagoda.backends.torch_cuda.model.mixers.latent_attention import contexts
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.mixers.indexer import BlockSelector, IndexProjection
from pagoda.common.models.mixers import Attention, BlockIndexer

MAX_SEQUENCES: Final = 65535
"""Sequences of a launch of decode attention, the extent of a grid's last axis."""


def block_index(spec: BlockIndexer, attention: Attention, build: CudaBuildContext, prefix: str) -> BlockSelector:
    """Return one layer's indexer; a rank has the queries of its KV heads."""
    project = IndexProjection(
        q=build.linear(f"{prefix}.blocks.q"),
        k=build.linear(f"{prefix}.blocks.k"),
        q_norm=build.rows_norm(spec.norm, f"{prefix}.blocks.q_norm"),
        k_norm=build.rows_norm(spec.norm, f"{prefix}.blocks.k_norm"),
        heads=build.shard.share(attention.kv_heads),
    )
    return BlockSelector(spec, project)


class CudaBlockAttention(CudaAttention):
    """One layer's attention over a rank's share of the heads."""

    def __init__(
        self,
        spec: Attention,
        tables: RotaryTables,
        build: CudaBuildContext,
        prefix: str,
        numbers: tuple[int, ...],
    ) -> None:
        """`numbers`: of its caches, that of the indexer's keys second."""
        super().__init__(spec, tables[spec.rope], build, prefix, numbers[0])
        assert spec.blocks is not None
        self.index = block_index(spec.blocks, spec, build, prefix)
        self.index_cos_sin = tables[spec.blocks.rope]
        self.index_number = numbers[1]

    def __call__(self, x: Tensor, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return [T, D] of x [T, D]."""
        cache = caches[self.number]
        keys = caches[self.index_number]
        assert isinstance(cache, CudaLayerCache), "attention keeps K and V"
        assert isinstance(keys, CudaArrayCache), "an indexer keeps keys"
        queries = self.queries(x, batch, cache)
        rotate = partial(rotated, positions=batch.positions, cos_sin=self.index_cos_sin)
        slots = batch.groups[keys.group].slots.long()
        keys.array.view(-1, keys.array.shape[2]).index_copy_(0, slots, self.index.project.keys(x, rotate))
        rows, lens = contexts(batch)
        selected = select_pages(
            self.index.project.queries(x, rotate).contiguous(),
            keys.array,
            batch.groups[keys.group].tables,
            batch.groups[cache.group].tables,
            rows,
            lens,
            spec=self.index.spec,
            several=batch.tiles is not None,
            use_kernel=self.device.use_kernels,
        )
        return self.project.out(self._attend_selected(queries, batch, cache, selected), x)

    def _attend_selected(
        self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, selected: SelectedPages
    ) -> Tensor:
        """Return [T, N, H] of queries [T, N, H], each KV head of a token a sequence."""
        blocks = self.index.spec
        sequences = queries.view(-1, self.project.heads // self.project.kv_heads, self.spec.head_dim)
        keys, values = (SelectedPages.pages_of(each, blocks) for each in (cache.keys, cache.values))
        one = self.span is not None or batch.tiles is not None
        longest = blocks.top_k * blocks.tokens
        chip = self.device.chip
        parts = [
            decode_attention(
                part,
                keys,
                values,
                tables,
                lens,
                scale=self.spec.scale,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                work=None if one else even_pieces(len(lens), 1, longest, lens.device, chip),
                use_kernel=self.device.use_kernels,
                chip=chip,
            )
            for part, tables, lens in zip(
                *(each.split(MAX_SEQUENCES) for each in (sequences, selected.tables, selected.lens))
            )
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(queries.shape)
