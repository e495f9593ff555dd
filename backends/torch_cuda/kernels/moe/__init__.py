"""Routed mixtures of experts."""

from pagoda.backends.torch_cuda.kernels.moe.api import moe

__all__ = ["moe"]
