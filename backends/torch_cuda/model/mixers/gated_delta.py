"""The gated delta rule on a rank: projections, then a kernel over the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights, gated_delta
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.interface import CONVOLUTIONS, PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankNorm, recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import GatedDelta


class CudaGatedDelta:
    """One layer's projections and rule on a rank."""

    def __init__(self, spec: GatedDelta, build: CudaBuildContext, prefix: str) -> None:
        params = build.params
        share = build.shard.share
        self.spec = replace(spec, key_heads=share(spec.key_heads), value_heads=share(spec.value_heads))
        self.qkv = build.linear(f"{prefix}.qkv")
        self.gate = build.linear(f"{prefix}.gate")
        self.scalars = build.linear(f"{prefix}.scalars")
        self.out = build.summed(f"{prefix}.out")
        self.device = build.device
        small = (params[f"{prefix}.{name}"] for name in ("conv", "decay_rate", "decay_offset"))
        self.weights = DeltaWeights(*small)
        self.norm = RankNorm(spec.norm, build, f"{prefix}.norm", spec.value_heads)

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        device = self.device
        heads = gated_delta(
            self.qkv(x),
            self.scalars(x),
            step,
            spec=self.spec,
            weights=self.weights,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )
        return self.out(self.norm(heads, self.gate(x)))


GATED_DELTA: Final = recurrent_ops(
    GatedDelta,
    lambda spec, tables, build, prefix: CudaGatedDelta(spec, build, prefix),
    fused={**PROJECTIONS, **CONVOLUTIONS, "beta": "scalars", "decay": "scalars"},
    matrices=frozenset({"qkv", "gate", "out"}),
    key_heads=lambda spec: spec.key_heads,
)
