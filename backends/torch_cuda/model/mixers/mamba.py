"""The state space model of Mamba on a rank: projections, then kernels over the states."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights, causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan import Selection, SelectiveWeights, selective_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import Mamba


class CudaMamba:
    """One layer's projections, convolution and scan on a rank."""

    def __init__(self, spec: Mamba, build: CudaBuildContext, prefix: str) -> None:
        params = build.params
        self.spec = spec
        self.use_kernels = build.device.use_kernels
        self.inner = build.linear(f"{prefix}.inner")
        self.out = build.summed(f"{prefix}.out")
        self.selection = build.summed(f"{prefix}.selection")
        self.size = build.linear(f"{prefix}.step")
        self.convolution = ConvolutionWeights(params[f"{prefix}.conv"], params.get(f"{prefix}.conv_bias"))
        rate, offset, skip = (params[f"{prefix}.{name}"] for name in ("decay_rate", "step_offset", "skip"))
        self.weights = SelectiveWeights(rate, offset, skip)
        self.parts = [spec.step_rank, spec.state_dim, spec.state_dim]
        self.norms: list[RowNorm] = []
        if (part_norm := spec.part_norm) is not None:
            ones = rate.new_ones(max(self.parts), dtype=params["embed"].dtype)
            names = zip(("step_a", "b", "c"), self.parts)
            weights = (params[f"{prefix}.{name}_norm"] if part_norm.scale else ones[:size] for name, size in names)
            self.norms = [
                RowNorm(
                    weight,
                    eps=part_norm.eps,
                    kind=part_norm.kind,
                    unit_offset=part_norm.unit_offset,
                    use_kernel=self.use_kernels,
                )
                for weight in weights
            ]

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        v, gate = self.inner(x).chunk(2, -1)
        v = causal_convolution(v, step, self.convolution, use_kernel=self.use_kernels)
        low_rank, b, c = self._selected(v)
        chosen = Selection(self.size(low_rank), b, c)
        return self.out(selective_scan(v, gate, chosen, step, weights=self.weights, use_kernel=self.use_kernels))

    def _selected(self, v: Tensor) -> list[Tensor]:
        """Return the low-rank size, b and c of v [T, C], normalised."""
        parts = list(self.selection(v).split(self.parts, -1))
        return [norm(part)[0] for norm, part in zip(self.norms, parts)] if self.norms else parts


MAMBA: Final = recurrent_ops(
    Mamba,
    lambda spec, tables, build, prefix: CudaMamba(spec, build, prefix),
    fused={
        **dict.fromkeys(("v", "gate"), "inner"),
        **dict.fromkeys(("step_a", "b", "c"), "selection"),
        "v_conv": "conv",
        "o": "out",
    },
    matrices=frozenset({"inner", "out"}),
    small_matrices=frozenset({"selection", "step"}),
)
