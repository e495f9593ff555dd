"""Linear attention with a constant decay per head on a rank: projections, then a kernel over the states."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, rope_queries
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import DecayWeights, lightning_shape, linear_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.interface import PROJECTIONS
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankNorm, recurrent_ops
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import LightningAttention


class CudaLightningAttention:
    """One layer's projections and scan on a rank."""

    def __init__(self, spec: LightningAttention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        self.spec = spec
        self.cos_sin = cos_sin
        self.norms = _head_norms(spec, build, prefix)
        self.qkv = build.linear(f"{prefix}.qkv")
        self.gate = build.linear(f"{prefix}.gate")
        self.out = build.summed(f"{prefix}.out")
        self.device = build.device
        slopes = spec.slopes[build.shard.cut("N", spec.heads)]
        self.decay = DecayWeights(torch.tensor(slopes, dtype=torch.float32, device=build.device.torch))
        self.shape = lightning_shape(len(slopes), spec.head_dim)
        self.norm = RankNorm(spec.norm, build, f"{prefix}.norm", spec.groups, "sigmoid")

    def __call__(self, x: Tensor, step: StateStep) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        use_kernel = self.device.use_kernels
        qkv = self.qkv(x)
        if self.spec.silu:
            qkv = activation.plain(qkv, "silu", use_kernel=use_kernel)
        heads = linear_scan(
            self._rotated(qkv, step.positions),
            None,
            step,
            shape=self.shape,
            weights=self.decay,
            use_kernel=use_kernel,
            chip=self.device.chip,
        )
        heads = heads if self.spec.scale == 1.0 else heads * self.spec.scale
        return self.out(self.norm(heads, self.gate(x)))

    def _rotated(self, qkv: Tensor, positions: Tensor | None) -> Tensor:
        """Return qkv [T, 3*N*H] with queries and keys normalised and rotated."""
        if self.cos_sin is None and self.norms == (None, None):
            return qkv
        assert positions is not None, "the step has positions"
        q, k, v = qkv.chunk(3, -1)
        parts = []
        for part, weights in zip((q, k), self.norms):
            heads = part.shape[1] // self.spec.head_dim
            turned = rope_queries(
                part, positions, heads=heads, cos_sin=self.cos_sin, q_norm=weights, use_kernel=self.device.use_kernels
            )
            parts.append(turned.flatten(1))
        return torch.cat((*parts, v), -1)


def _head_norms(
    spec: LightningAttention, build: CudaBuildContext, prefix: str
) -> tuple[NormWeights | None, NormWeights | None]:
    """Return the norms of the heads of q and k."""
    if (norm := spec.qk_norm) is None:
        return None, None
    q, k = (NormWeights(build.params[f"{prefix}.{part}_norm"], norm.eps, norm.unit_offset) for part in "qk")
    return q, k


LIGHTNING_ATTENTION: Final = recurrent_ops(
    LightningAttention,
    lambda spec, tables, build, prefix: CudaLightningAttention(spec, tables[spec.rope], build, prefix),
    fused=PROJECTIONS,
    matrices=frozenset({"qkv", "gate", "out"}),
)
