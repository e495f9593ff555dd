"""The gated delta rule with a decay per channel on a rank: a kernel over the states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import channel_delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights
from pagoda.backends.torch_cuda.model.mixers.interface import CONVOLUTIONS, PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.kimi_delta import KimiDeltaMixer
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.common.models.mixers import KimiDelta


def _rule(spec: KimiDelta, own: RankLayer[KimiDelta]) -> StateRule:
    return partial(
        channel_delta,
        spec=replace(spec, heads=own.share(spec.heads)),
        weights=DeltaWeights(own.tensor("conv"), own.tensor("decay_rate"), own.tensor("decay_offset")),
        use_kernel=own.build.device.use_kernels,
        chip=own.build.device.chip,
    )


KIMI_DELTA: Final = recurrent_ops(
    KimiDelta,
    KimiDeltaMixer,
    _rule,
    fused={**PROJECTIONS, **CONVOLUTIONS, "beta": "scalars", "decay_a": "scalars", "gate_a": "scalars"},
    matrices=frozenset({"qkv", "gate", "decay", "out"}),
)
