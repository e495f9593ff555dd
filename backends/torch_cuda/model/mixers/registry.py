"""The kinds of mixer that this backend has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagoda.backends.torch_cuda.model.mixers.attention import ATTENTION
from pagoda.backends.torch_cuda.model.mixers.gated_delta import GATED_DELTA
from pagoda.backends.torch_cuda.model.mixers.interface import CudaMixerOps
from pagoda.backends.torch_cuda.model.mixers.kimi_delta import KIMI_DELTA
from pagoda.backends.torch_cuda.model.mixers.latent_attention import LATENT_ATTENTION
from pagoda.backends.torch_cuda.model.mixers.lightning_attention import LIGHTNING_ATTENTION
from pagoda.backends.torch_cuda.model.mixers.mamba import MAMBA
from pagoda.backends.torch_cuda.model.mixers.mamba2 import MAMBA2
from pagoda.backends.torch_cuda.model.mixers.short_convolution import SHORT_CONVOLUTION
from pagoda.common.models.mixers import Mixer

MIXERS: Final[Mapping[type[Mixer], CudaMixerOps[Any]]] = {
    ops.kind: ops
    for ops in (
        ATTENTION,
        GATED_DELTA,
        KIMI_DELTA,
        LATENT_ATTENTION,
        LIGHTNING_ATTENTION,
        MAMBA,
        MAMBA2,
        SHORT_CONVOLUTION,
    )
}


def ops_of(mixer: Mixer) -> CudaMixerOps[Any]:
    """Return what the backend knows of the mixer's kind. `check_mixers` must have passed."""
    return MIXERS[type(mixer)]
