"""The gated delta rule on a rank: a kernel over the states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights, gated_delta
from pagoda.backends.torch_cuda.model.mixers.interface import CONVOLUTIONS, PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.gated_delta import GatedDeltaMixer
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.common.models.mixers import GatedDelta


def _rule(spec: GatedDelta, own: RankLayer[GatedDelta]) -> StateRule:
    return partial(
        gated_delta,
        spec=replace(spec, key_heads=own.share(spec.key_heads), value_heads=own.share(spec.value_heads)),
        weights=DeltaWeights(own.tensor("conv"), own.tensor("decay_rate"), own.tensor("decay_offset")),
        use_kernel=own.build.device.use_kernels,
        chip=own.build.device.chip,
    )


GATED_DELTA: Final = recurrent_ops(
    GatedDelta,
    GatedDeltaMixer,
    _rule,
    fused={**PROJECTIONS, **CONVOLUTIONS, "beta": "scalars", "decay": "scalars"},
    matrices=frozenset({"qkv", "gate", "out"}),
    key_heads=lambda spec: spec.key_heads,
)
