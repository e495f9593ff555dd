"""Grouped-query attention: over the paged cache, within prompts, and to selected blocks."""

from __future__ import annotations

from typing import Final

from pagoda.backends.reference.model.mixers.attention.block_sparse import PagedBlockAttention
from pagoda.backends.reference.model.mixers.attention.packed import PackedAttention
from pagoda.backends.reference.model.mixers.attention.paged import (
    InvariantHeads,
    PagedAttention,
    PagedHeads,
    fused_attention,
)
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, load_attention
from pagoda.backends.reference.model.mixers.interface import MixerBuild, MixerOps
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.common.models.mixers import Attention


def _paged(spec: Attention, params: AttentionParams, caches: tuple[int, ...], build: MixerBuild) -> MixerStep:
    if spec.blocks is not None:
        return PagedBlockAttention(spec, params, caches)
    native = build.native
    if native is not None and (fused := fused_attention(spec, params, caches[0], native)) is not None:
        return fused
    kind = InvariantHeads if build.batch_invariant else PagedHeads
    return PagedAttention(spec, params, kind(spec, caches[0], params.sinks))


ATTENTION: Final = MixerOps(Attention, load=load_attention, paged=_paged, packed=PackedAttention)
