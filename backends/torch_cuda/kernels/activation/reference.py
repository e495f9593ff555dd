"""What the activation kernels compute, in plain torch."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.ops import activation
from pagoda.backends.torch_cuda.kernels.float8 import quantised_rows
from pagoda.common.models.spec import Activation


def gated(both: Tensor, name: Activation) -> Tensor:
    """As api.gated."""
    first, second = both.chunk(2, -1)
    return activation(name)(first) * second


def plain(x: Tensor, name: Activation) -> Tensor:
    """As api.plain."""
    return activation(name)(x)


def gated_quantised(both: Tensor, name: Activation) -> tuple[Tensor, Tensor]:
    """As api.gated_quantised."""
    return quantised_rows(gated(both, name))
