"""The kinds of mixer: how a layer combines information from several tokens.

Each kind owns what depends on it: its caches, its parameters with their logical axes, its ropes and how its heads are
sharded. Everything else works on `Mixer` through these methods; a backend matches on the kind once, when it builds a
layer. Parameter names are relative to the mixer.
"""

from __future__ import annotations

from pagoda.common.models.mixers.attention import Attention, BlockIndexer, Indexer, LatentAttention, QueryGrowth
from pagoda.common.models.mixers.recurrent import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    ShortConvolution,
)

__all__ = [
    "Attention",
    "BlockIndexer",
    "GatedDelta",
    "Indexer",
    "KimiDelta",
    "LatentAttention",
    "LightningAttention",
    "Mamba",
    "Mamba2",
    "Mixer",
    "QueryGrowth",
    "Recurrent",
    "ShortConvolution",
]

Recurrent = GatedDelta | KimiDelta | LightningAttention | Mamba | Mamba2 | ShortConvolution
"""Mixers with one cache, a StateCache."""

Mixer = Attention | LatentAttention | Recurrent
