"""Sampling of one token per row by Gumbel-max, and recording it."""

from pagoda.backends.torch_cuda.kernels.gumbel_max.api import gumbel_max, store_tokens

__all__ = ["gumbel_max", "store_tokens"]
