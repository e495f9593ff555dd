"""The elementwise functions of feed-forward blocks, gated or plain."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.model.ops import activation, clamped_glu, clipped
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import quantised_rows
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip
from pagoda.backends.torch_cuda.kernels.pointwise.activation import kernel
from pagoda.common.models.spec import Activation, ClampedGlu

__all__ = ["gated", "gated_quantised", "plain"]


def gated(
    both: Tensor,
    name: Activation,
    *,
    use_kernel: bool,
    clamped: ClampedGlu | None = None,
    limit: float | None = None,
) -> Tensor:
    """Return act(first half) * second half of both [T, 2F]: [T, F], in its dtype; any row stride.

    Computed in float32, rounded after the activation and after the product. `clamped`: the function of both halves that
    takes the place of act and product. `limit`: act is at most this, the second half within plus or minus this. Raise
    ValueError for other shapes.
    """
    _check(both, 2)
    if use_kernel:
        return kernel.gated(both, name, clamped, limit)
    return gated_reference(both, name, clamped, limit)


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


def gated_reference(
    both: Tensor, name: Activation, clamped: ClampedGlu | None = None, limit: float | None = None
) -> Tensor:
    first, second = both.chunk(2, -1)
    if clamped is not None:
        return clamped_glu(first, second, clamped)
    hidden = activation(name, batch_invariant=True)(first)
    return hidden * second if limit is None else clipped(hidden, second, limit)


def plain_reference(x: Tensor, name: Activation) -> Tensor:
    return activation(name, batch_invariant=True)(x)


def gated_quantised_reference(both: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    return quantised_rows(gated_reference(both, name))
