"""The state space model of Mamba-2 on a rank: kernels over the states."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import DecayWeights, linear_scan, mamba2_shape
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.mamba2 import Mamba2Mixer
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.common.models.mixers import Mamba2


def _rule(spec: Mamba2, own: RankLayer[Mamba2]) -> StateRule:
    device = own.build.device
    use_kernel = device.use_kernels
    convolution = own.convolution()
    shape = mamba2_shape(own.share(spec.heads), spec.head_dim, own.share(spec.groups), spec.state_dim, spec.taps)
    rate, offset, skip = (own.tensor(name) for name in ("decay_rate", "step_offset", "skip"))
    decay = DecayWeights(rate, offset, skip, spec.step_limit)

    def scan(vbc: Tensor, sizes: Tensor, step: StateStep) -> Tensor:
        vbc = causal_convolution(vbc, step, convolution, use_kernel=use_kernel)
        return linear_scan(vbc, sizes, step, shape=shape, weights=decay, use_kernel=use_kernel, chip=device.chip)

    return scan


MAMBA2: Final = recurrent_ops(
    Mamba2,
    Mamba2Mixer,
    _rule,
    fused={
        **dict.fromkeys(("gate", "v", "b", "c"), "inner"),
        **dict.fromkeys(("v_conv", "b_conv", "c_conv"), "conv"),
        "step": "scalars",
        "o": "out",
    },
    matrices=frozenset({"inner", "out"}),
    key_heads=lambda spec: spec.groups,
)
