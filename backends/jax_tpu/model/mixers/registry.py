"""The registry of mixers: `ops_of` returns what the backend knows of a mixer's kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagoda.backends.jax_tpu.model.mixers.attention import AttentionOps
from pagoda.backends.jax_tpu.model.mixers.gated_delta import GatedDeltaOps
from pagoda.backends.jax_tpu.model.mixers.kimi_delta import KimiDeltaOps
from pagoda.backends.jax_tpu.model.mixers.latent_attention import LatentAttentionOps
from pagoda.backends.jax_tpu.model.mixers.lightning_attention import LightningAttentionOps
from pagoda.backends.jax_tpu.model.mixers.mamba import MambaOps
from pagoda.backends.jax_tpu.model.mixers.mamba2 import Mamba2Ops
from pagoda.backends.jax_tpu.model.mixers.ops import JaxMixerOps, MixerT
from pagoda.backends.jax_tpu.model.mixers.short_convolution import ShortConvolutionOps
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    ShortConvolution,
)

MIXERS: Final[Mapping[type, JaxMixerOps[Any]]] = {
    Attention: AttentionOps(),
    GatedDelta: GatedDeltaOps(),
    KimiDelta: KimiDeltaOps(),
    LatentAttention: LatentAttentionOps(),
    LightningAttention: LightningAttentionOps(),
    Mamba: MambaOps(),
    Mamba2: Mamba2Ops(),
    ShortConvolution: ShortConvolutionOps(),
}


def ops_of(mixer: MixerT) -> JaxMixerOps[MixerT]:
    """Return what the backend knows of the mixer's kind. `check_mixers` must have passed."""
    return MIXERS[type(mixer)]
