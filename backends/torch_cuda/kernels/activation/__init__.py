"""The elementwise functions of feed-forward blocks, gated or plain."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.model.ops import activation
from pagoda.backends.torch_cuda.kernels.activation import kernel
from pagoda.backends.torch_cuda.kernels.fp8_convert import quantised_rows
from pagoda.backends.torch_cuda.kernels.launch import CHIPS, Chip
from pagoda.common.models.spec import Activation

__all__ = ["gated", "gated_quantised", "plain"]


def gated(both: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """Return act(first half) * second half of both [T, 2F]: [T, F], in its dtype; any row stride.

    Computed in float32, rounded after the activation and after the product. Raise ValueError for other shapes.
    """
    _check(both, 2)
    return kernel.gated(both, name) if use_kernel else gated_reference(both, name)


def plain(x: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """Return the activation of x [T, F], in its dtype; any row stride. Raise ValueError for other shapes."""
    _check(x, 1)
    return kernel.plain(x, name) if use_kernel else plain_reference(x, name)


def gated_quantised(
    both: Tensor, name: Activation, *, use_kernel: bool, chip: Chip = CHIPS["sm_80"]
) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn [T, F], scale float32 [T, 1]) with `gated` = stored * scale, row by row."""
    _check(both, 2)
    return kernel.gated_quantised(both, name, chip) if use_kernel else gated_quantised_reference(both, name)


def _check(x: Tensor, parts: int) -> None:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] % parts:
        raise ValueError(f"rows are {tuple(x.shape)} with strides {x.stride()}, not {parts} parts side by side")


def gated_reference(both: Tensor, name: Activation) -> Tensor:
    first, second = both.chunk(2, -1)
    return activation(name)(first) * second


def plain_reference(x: Tensor, name: Activation) -> Tensor:
    return activation(name)(x)


def gated_quantised_reference(both: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    return quantised_rows(gated_reference(both, name))
