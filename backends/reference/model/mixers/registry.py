"""The kinds of mixer that this backend has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagoda.backends.reference.model.mixers.attention import ATTENTION
from pagoda.backends.reference.model.mixers.interface import MixerOps
from pagoda.backends.reference.model.mixers.latent_attention import LATENT_ATTENTION
from pagoda.backends.reference.model.mixers.recurrence import RECURRENT
from pagoda.common.models.mixers import Mixer

MIXERS: Final[Mapping[type[Mixer], MixerOps[Any, Any]]] = {
    ops.kind: ops for ops in (ATTENTION, LATENT_ATTENTION, *RECURRENT)
}


def ops_of(mixer: Mixer) -> MixerOps[Any, Any]:
    """Return what the backend knows of the mixer's kind."""
    return MIXERS[type(mixer)]
