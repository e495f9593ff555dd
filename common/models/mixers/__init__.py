"""The kinds of mixer: how a layer combines information from several tokens.

Each kind owns what depends on it: its caches, its parameters with their logical axes, its ropes and how its heads are
sharded. Everything else works on `Mixer` through these methods; a backend matches on the kind once, when it builds a
layer. Parameter names are relative to the mixer.
"""

from __future__ import annotations

from pagoda.common.models.mixers.attention import Attention, BlockIndexer, QueryGrowth
from pagoda.common.models.mixers.gated_delta import GatedDelta
from pagoda.common.models.mixers.kimi_delta import KimiDelta
from pagoda.common.models.mixers.latent_attention import Indexer, LatentAttention
from pagoda.common.models.mixers.lightning_attention import LightningAttention
from pagoda.common.models.mixers.mamba import Mamba
from pagoda.common.models.mixers.mamba2 import Mamba2
from pagoda.common.models.mixers.short_convolution import ShortConvolution

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
