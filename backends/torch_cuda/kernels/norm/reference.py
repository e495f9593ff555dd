"""What the norm kernels compute, in plain torch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pagoda.backends.reference import ops
from pagoda.backends.torch_cuda.kernels.float8 import quantised_rows
from pagoda.common.models.spec import Norm


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Literal["rms", "layer"],
    unit_offset: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As api.norm."""
    total = x if residual is None else x + residual
    return ops.norm(total, Norm(eps, kind, unit_offset, bias is not None), weight, bias), total


def norm_quantised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Literal["rms", "layer"],
    unit_offset: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As api.norm_quantised."""
    normed, total = norm(x, weight, bias, eps, kind, unit_offset, residual)
    return *quantised_rows(normed), total
