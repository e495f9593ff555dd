"""The short convolution between two gates on a rank: a kernel over the states."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankLayer, recurrent_ops
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule
from pagoda.backends.torch_decoder.mixers.short_convolution import ShortConvolutionMixer
from pagoda.common.models.mixers import ShortConvolution


def _rule(spec: ShortConvolution, own: RankLayer[ShortConvolution]) -> StateRule:
    convolution = own.convolution()
    use_kernel = own.build.device.use_kernels

    def convolve(b: Tensor, c: Tensor, v: Tensor, step: StateStep) -> Tensor:
        return causal_convolution(v, step, convolution, gates=(b, c), use_kernel=use_kernel)

    return convolve


SHORT_CONVOLUTION: Final = recurrent_ops(
    ShortConvolution,
    ShortConvolutionMixer,
    _rule,
    fused={**dict.fromkeys("bcv", "inner"), "o": "out"},
    matrices=frozenset({"inner", "out"}),
    dropped=frozenset({1}),  # c
)
