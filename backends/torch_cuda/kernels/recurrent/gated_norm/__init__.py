"""The norm over groups of channels, times a gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm import kernel
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm.kernel import GatedNorm
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.primitives import Norm

__all__ = ["GatedNorm", "activated", "gated_norm"]


def gated_norm(
    x: Tensor, gate: Tensor, spec: GatedNorm, *, mean_square: Tensor | None = None, use_kernel: bool
) -> Tensor:
    """Return norm(x) * activation(gate) [T, W]; x is contiguous, gate of any row stride.

    `mean_square`: of each group, float32 [T, groups], where x has only a rank's part of its channels. Raise ValueError
    for other shapes.
    """
    width = x.shape[1] // spec.groups
    if x.shape != gate.shape or width * spec.groups != x.shape[1] or not x.is_contiguous() or gate.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)}, gates {tuple(gate.shape)}, of {spec.groups} groups")
    if spec.weight is not None and spec.weight.shape not in ((width,), (x.shape[1],)):
        raise ValueError(f"weights are {tuple(spec.weight.shape)}, of groups of {width} channels")
    if mean_square is not None and (mean_square.shape != (len(x), spec.groups) or not mean_square.is_contiguous()):
        raise ValueError(f"mean squares are {tuple(mean_square.shape)}, of {spec.groups} groups")
    if use_kernel:
        return kernel.gated_norm(x, gate, spec, mean_square)
    factor = activated(gate, spec)
    if spec.weight is None:
        return (x.float() * factor).to(x.dtype)
    weight = spec.weight if len(spec.weight) == width else spec.weight.view(spec.groups, width)
    mixed = (x.float() * factor if spec.gate_first else x).unflatten(1, (-1, width))
    normed = norm(mixed, Norm(spec.eps, "rms", spec.unit_offset), weight)
    if mean_square is not None:
        own = mixed.float().square().mean(2, keepdim=True)
        normed = normed.float() * ((own + spec.eps) / (mean_square[..., None] + spec.eps)).sqrt()
    normed = normed.flatten(1)
    return (normed if spec.gate_first else normed.float() * factor).to(x.dtype)


def activated(gate: Tensor, spec: GatedNorm) -> Tensor:
    """Return what a gate multiplies by, float32."""
    return F.silu(gate.float()) if spec.activation == "silu" else gate.float().sigmoid()
