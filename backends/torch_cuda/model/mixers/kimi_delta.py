"""The gated delta rule with a decay per channel on a rank: projections, then a kernel over the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import channel_delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.interface import CONVOLUTIONS, PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankNorm, recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import KimiDelta


class CudaKimiDelta:
    """One layer's projections and rule on a rank."""

    def __init__(self, spec: KimiDelta, build: CudaBuildContext, prefix: str) -> None:
        params = build.params
        heads = build.shard.share(spec.heads)
        self.spec = replace(spec, heads=heads)
        self.device = build.device
        self.low_rank = None if spec.rank is None else [heads, spec.rank, spec.rank]
        self.qkv = build.linear(f"{prefix}.qkv")
        self.scalars = build.linear(f"{prefix}.scalars")
        suffix = "" if spec.rank is None else "_b"
        self.decay = build.linear(f"{prefix}.decay{suffix}")
        self.gate = build.linear(f"{prefix}.gate{suffix}")
        self.out = build.summed(f"{prefix}.out")
        small = (params[f"{prefix}.{name}"] for name in ("conv", "decay_rate", "decay_offset"))
        self.weights = DeltaWeights(*small)
        self.norm = RankNorm(spec.norm, build, f"{prefix}.norm", spec.heads, "sigmoid")

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        scalars = self.scalars(x)
        beta, decay, gate = (scalars, x, x) if self.low_rank is None else scalars.split(self.low_rank, -1)
        heads = channel_delta(
            self.qkv(x),
            beta,
            self.decay(decay),
            step,
            spec=self.spec,
            weights=self.weights,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )
        return self.out(self.norm(heads, self.gate(gate)))


KIMI_DELTA: Final = recurrent_ops(
    KimiDelta,
    lambda spec, tables, build, prefix: CudaKimiDelta(spec, build, prefix),
    fused={**PROJECTIONS, **CONVOLUTIONS, "beta": "scalars", "decay_a": "scalars", "gate_a": "scalars"},
    matrices=frozenset({"qkv", "gate", "decay", "out"}),
)
