"""The short convolution between two gates on a rank."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights, causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import ShortConvolution


class CudaShortConvolution:
    """One layer's projections and convolution on a rank."""

    def __init__(self, build: CudaBuildContext, prefix: str) -> None:
        params = build.params
        self.inner = build.linear(f"{prefix}.inner")
        self.out = build.summed(f"{prefix}.out")
        self.convolution = ConvolutionWeights(params[f"{prefix}.conv"], params.get(f"{prefix}.conv_bias"))
        self.use_kernels = build.device.use_kernels

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        b, c, v = self.inner(x).chunk(3, -1)
        return self.out(causal_convolution(v, step, self.convolution, gates=(b, c), use_kernel=self.use_kernels))


SHORT_CONVOLUTION: Final = recurrent_ops(
    ShortConvolution,
    lambda spec, tables, build, prefix: CudaShortConvolution(build, prefix),
    fused={**dict.fromkeys("bcv", "inner"), "o": "out"},
    matrices=frozenset({"inner", "out"}),
)
