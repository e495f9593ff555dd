"""Linear maps over a rank's tensors, made once when a decoder is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.weight_only import weight_only_linear
from pagoda.backends.torch_cuda.parameters import Matrix

Linear = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]."""


def linear(weight: Matrix, bias: Tensor | None, device: Device) -> Linear:
    """A map for weight [out, in], packed or not, and bias [out]; filling them anew in place changes the map."""
    if isinstance(weight, Tensor):
        return partial(F.linear, weight=weight, bias=bias)
    return partial(weight_only_linear, packed=weight, bias=bias, use_kernel=device.use_kernels, chip=device.chip)
