"""The elementwise functions of feed-forward blocks, gated or plain."""

from pagoda.backends.torch_cuda.kernels.activation.api import gated, gated_quantised, plain

__all__ = ["gated", "gated_quantised", "plain"]
