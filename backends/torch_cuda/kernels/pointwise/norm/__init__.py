"""RMSNorm and LayerNorm, with the residual addition before and float8 rounding after."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import empty_rows, native, quantised_rows
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.pointwise.norm import kernel
from pagoda.backends.torch_decoder import functions
from pagoda.common.models.primitives import Norm

__all__ = ["RowNorm"]

Kind = Literal["rms", "layer"]
MAX_WIDTH: Final = 32768
"""Maximum columns, which one program keeps in registers."""


class RowNorm:
    """A norm with its weights [D], which stay where they are.

    `unit_offset`: multiply by 1 + weight. Computed in float32, rounded where `torch_decoder.functions.norm` rounds.
    `chip` selects the float8 conversion. Raise ValueError for other shapes or types.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        eps: float,
        kind: Kind,
        unit_offset: bool = False,
        use_kernel: bool,
        chip: Chip = CHIPS["sm_80"],
    ) -> None:
        _check_weights(weight, bias, kind)
        self.weight = weight
        self.bias = bias
        self._eps = eps
        self._kind: Kind = kind
        self._unit_offset = unit_offset
        self._launch: kernel.NormLaunch | None = None
        self._launch_quantised: kernel.NormLaunch | None = None
        if use_kernel:
            launch = partial(kernel.NormLaunch, weight=weight, bias=bias, eps=eps, kind=kind, unit_offset=unit_offset)
            self._launch = launch()
            self._launch_quantised = launch(native=native(chip, weight))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, total), both [T, D] in x's dtype: the norm of total = x + residual (x without residual).

        x, residual [T, D], any row stride.
        """
        self._check(x, residual)
        if self._launch is None:
            return norm_reference(
                x,
                weight=self.weight,
                bias=self.bias,
                eps=self._eps,
                kind=self._kind,
                unit_offset=self._unit_offset,
                residual=residual,
            )
        normed = torch.empty_like(x)
        return normed, self._launch(x, residual, normed)

    def quantised(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (float8_e4m3fn [T, D], scale float32 [T, 1], total [T, D]): the norm as stored * scale, by row."""
        self._check(x, residual)
        if self._launch_quantised is None:
            return norm_quantised_reference(
                x,
                weight=self.weight,
                bias=self.bias,
                eps=self._eps,
                kind=self._kind,
                unit_offset=self._unit_offset,
                residual=residual,
            )
        bits, scale = empty_rows(x, x.shape[1])
        total = self._launch_quantised(x, residual, bits, scale)
        return bits.view(torch.float8_e4m3fn), scale, total

    def _check(self, x: Tensor, residual: Tensor | None) -> None:
        shape = x.shape
        if len(shape) != 2 or x.stride(1) != 1:
            raise ValueError(f"x is {tuple(shape)} with strides {x.stride()}, not rows [T, D]")
        if shape[1:] != self.weight.shape:
            raise ValueError(f"weight is {tuple(self.weight.shape)}, not {tuple(shape[1:])}")
        if residual is not None and (residual.shape != shape or residual.dtype != x.dtype or residual.stride(1) != 1):
            raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, not {x.dtype} {tuple(shape)}")


def _check_weights(weight: Tensor, bias: Tensor | None, kind: Kind) -> None:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != weight.shape or vector.ndim != 1 or not vector.is_contiguous()):
            raise ValueError(f"{name} is {tuple(vector.shape)}, not contiguous or not {tuple(weight.shape[-1:])}")
    if weight.shape[0] > MAX_WIDTH:
        raise ValueError(f"rows of {weight.shape[0]} are wider than {MAX_WIDTH}")
    if bias is not None and kind != "layer":
        raise ValueError("only a layer norm has a bias")


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
    return functions.norm(total, Norm(eps, kind, unit_offset, bias is not None), weight, bias), total


def norm_quantised_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Kind,
    unit_offset: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = norm_reference(
        x, weight=weight, bias=bias, eps=eps, kind=kind, unit_offset=unit_offset, residual=residual
    )
    return *quantised_rows(normed), total
