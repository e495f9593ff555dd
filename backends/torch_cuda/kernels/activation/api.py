"""Activations: the entry points."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.model.ops import activation
from pagoda.backends.torch_cuda.kernels.activation import kernel
from pagoda.backends.torch_cuda.kernels.fp8_convert import quantised_rows
from pagoda.backends.torch_cuda.kernels.launch import CHIPS, Chip
from pagoda.common.models.spec import Activation

# What the activation kernels compute, in plain torch.


def gated_reference(both: Tensor, name: Activation) -> Tensor:
    """As api.gated."""
    first, second = both.chunk(2, -1)
    return activation(name)(first) * second


def plain_reference(x: Tensor, name: Activation) -> Tensor:
    """As api.plain."""
    return activation(name)(x)


def gated_quantised_reference(both: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    """As api.gated_quantised."""
    return quantised_rows(gated_reference(both, name))


def gated(both: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """act(first half) * second half of both [T, 2F] -> [T, F], in its dtype; the rows any distance apart.

    Computed in float32, rounded once after the activation and once after the product. ValueError: not such rows.
    """
    _check(both, 2)
    return kernel.gated(both, name) if use_kernel else gated_reference(both, name)


def plain(x: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """The activation of x [T, F], in its dtype; the rows any distance apart. ValueError: not rows."""
    _check(x, 1)
    return kernel.plain(x, name) if use_kernel else plain_reference(x, name)


def gated_quantised(
    both: Tensor, name: Activation, *, use_kernel: bool, chip: Chip = CHIPS["sm_80"]
) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [T, F], scale float32 [T, 1]): what `gated` gives, as stored * scale, row by row."""
    _check(both, 2)
    return kernel.gated_quantised(both, name, chip) if use_kernel else gated_quantised_reference(both, name)


def _check(x: Tensor, parts: int) -> None:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] % parts:
        raise ValueError(f"rows are {tuple(x.shape)} with strides {x.stride()}, not {parts} parts side by side")
