"""Activations: the entry points."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.activation import kernel, reference
from pagoda.backends.torch_cuda.kernels.chips import CHIPS, Chip
from pagoda.common.models.spec import Activation


def gated(both: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """act(first half) * second half of both [T, 2F] -> [T, F], in its dtype; the rows any distance apart.

    Computed in float32, rounded once after the activation and once after the product. ValueError: not such rows.
    """
    _check(both, 2)
    return kernel.gated(both, name) if use_kernel else reference.gated(both, name)


def plain(x: Tensor, name: Activation, *, use_kernel: bool) -> Tensor:
    """The activation of x [T, F], in its dtype; the rows any distance apart. ValueError: not rows."""
    _check(x, 1)
    return kernel.plain(x, name) if use_kernel else reference.plain(x, name)


def gated_quantised(
    both: Tensor, name: Activation, *, use_kernel: bool, chip: Chip = CHIPS["sm_80"]
) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [T, F], scale float32 [T, 1]): what `gated` gives, as stored * scale, row by row."""
    _check(both, 2)
    return kernel.gated_quantised(both, name, chip) if use_kernel else reference.gated_quantised(both, name)


def _check(x: Tensor, parts: int) -> None:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] % parts:
        raise ValueError(f"rows are {tuple(x.shape)} with strides {x.stride()}, not {parts} parts side by side")
