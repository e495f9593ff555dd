"""The token of each row: the best, or the best after noise; and where it is written down."""

from pagoda.backends.torch_cuda.kernels.gumbel_max.api import gumbel_max, remember

__all__ = ["gumbel_max", "remember"]
