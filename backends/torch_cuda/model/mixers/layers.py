"""The mixers with recurrent state, a class per kind: projections, then kernels over the states, on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, rope_queries
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution import ConvolutionWeights, causal_convolution
from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta import channel_delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import DeltaWeights, gated_delta
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan import (
    DecayWeights,
    lightning_shape,
    linear_scan,
    mamba2_shape,
)
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan import Selection, SelectiveWeights, selective_scan
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_cuda.model.mixers.recurrence import RankNorm, Recurrence
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.rope import Rope


def make_recurrence(
    spec: Recurrent, tables: Mapping[Rope | None, Tensor | None], build: CudaBuildContext, prefix: str
) -> Recurrence:
    """Return the mixer, of which a rank has its share of the heads or channels. `tables`: see `rotary_tables`."""
    match spec:
        case GatedDelta():
            return CudaGatedDelta(spec, build, prefix)
        case KimiDelta():
            return CudaKimiDelta(spec, build, prefix)
        case LightningAttention():
            return CudaLightningAttention(spec, tables[spec.rope], build, prefix)
        case Mamba():
            return CudaMamba(spec, build, prefix)
        case Mamba2():
            return CudaMamba2(spec, build, prefix)
        case ShortConvolution():
            return CudaShortConvolution(build, prefix)


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
