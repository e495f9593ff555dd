"""RMSNorm and LayerNorm, with the residual addition before and float8 rounding after."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from pagoda.backends.reference.model import ops
from pagoda.backends.torch_cuda.kernels.fp8_convert import quantised_rows
from pagoda.backends.torch_cuda.kernels.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.norm import kernel
from pagoda.common.models.primitives import Norm

__all__ = ["norm", "norm_quantised"]

Kind = Literal["rms", "layer"]
MAX_WIDTH: Final = 32768
"""Maximum columns, which one program keeps in registers."""


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: Kind,
    unit_offset: bool = False,
    residual: Tensor | None = None,
    use_kernel: bool,
) -> tuple[Tensor, Tensor]:
    """Return (normed, total), both [T, D] in x's dtype: the norm of total = x + residual (x without residual).

    x, residual [T, D], any row stride; weight, bias [D]. `unit_offset`: multiply by 1 + weight. Computed in float32,
    rounded where `backends.reference.ops.norm` rounds. Raise ValueError for other shapes or types.
    """
    _check(x, weight, bias, residual, kind)
    if not use_kernel:
        return norm_reference(x, weight, bias, eps, kind, unit_offset, residual)
    return kernel.norm(x, weight, bias, eps, kind, unit_offset, residual)


def norm_quantised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: Kind,
    unit_offset: bool = False,
    residual: Tensor | None = None,
    use_kernel: bool,
    chip: Chip = CHIPS["sm_80"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (float8_e4m3fn [T, D], scale float32 [T, 1], total [T, D]): `norm` as stored * scale, row by row."""
    _check(x, weight, bias, residual, kind)
    if not use_kernel:
        return norm_quantised_reference(x, weight, bias, eps, kind, unit_offset, residual)
    return kernel.norm_quantised(x, weight, bias, eps, kind, unit_offset, residual, chip)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: Kind) -> None:
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)} with strides {x.stride()}, not rows [T, D]")
    if x.shape[1] > MAX_WIDTH:
        raise ValueError(f"rows of {x.shape[1]} are wider than {MAX_WIDTH}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[1:] or not vector.is_contiguous()):
            raise ValueError(f"{name} is {tuple(vector.shape)}, not {tuple(x.shape[1:])}")
    if bias is not None and kind != "layer":
        raise ValueError("only a layer norm has a bias")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, not {x.dtype} {tuple(x.shape)}")


def norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Kind,
    unit_offset: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return ops.norm(total, Norm(eps, kind, unit_offset, bias is not None), weight, bias), total


def norm_quantised_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Kind,
    unit_offset: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = norm_reference(x, weight, bias, eps, kind, unit_offset, residual)
    return *quantised_rows(normed), total
