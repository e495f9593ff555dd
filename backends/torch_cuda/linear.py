"""Linear maps over a rank's tensors, made once when a decoder is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]."""


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A map for weight [out, in] and bias [out]; filling them anew in place changes the map."""
    return partial(F.linear, weight=weight, bias=bias)
