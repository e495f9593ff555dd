"""The state space model of Mamba-2 on a rank: projections, then kernels over the states."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights, causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import DecayWeights, linear_scan, mamba2_shape
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankNorm, recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import Mamba2


class CudaMamba2:
    """One layer's projections, convolution and scan on a rank."""

    def __init__(self, spec: Mamba2, build: CudaBuildContext, prefix: str) -> None:
        params = build.params
        heads = build.shard.share(spec.heads)
        groups = build.shard.share(spec.groups)
        self.inner = build.linear(f"{prefix}.inner")
        self.scalars = build.linear(f"{prefix}.scalars")
        self.out = build.summed(f"{prefix}.out")
        self.device = build.device
        self.convolution = ConvolutionWeights(params[f"{prefix}.conv"], params.get(f"{prefix}.conv_bias"))
        self.width = heads * spec.head_dim
        self.shape = mamba2_shape(heads, spec.head_dim, groups, spec.state_dim, spec.taps)
        rate, offset, skip = (params[f"{prefix}.{name}"] for name in ("decay_rate", "step_offset", "skip"))
        self.decay = DecayWeights(rate, offset, skip, spec.step_limit)
        gate_first = not spec.norm_before_gate
        self.norm = RankNorm(spec.norm, build, f"{prefix}.norm", spec.groups, gate_first=gate_first)

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        use_kernel = self.device.use_kernels
        inner = self.inner(x)
        gate = inner[:, : self.width]
        vbc = inner[:, self.width :]
        heads = linear_scan(
            causal_convolution(vbc, step, self.convolution, use_kernel=use_kernel),
            self.scalars(x),
            step,
            shape=self.shape,
            weights=self.decay,
            use_kernel=use_kernel,
            chip=self.device.chip,
        )
        return self.out(self.norm(heads, gate))


MAMBA2: Final = recurrent_ops(
    Mamba2,
    lambda spec, tables, build, prefix: CudaMamba2(spec, build, prefix),
    fused={
        **dict.fromkeys(("gate", "v", "b", "c"), "inner"),
        **dict.fromkeys(("v_conv", "b_conv", "c_conv"), "conv"),
        "step": "scalars",
        "o": "out",
    },
    matrices=frozenset({"inner", "out"}),
    key_heads=lambda spec: spec.groups,
)
