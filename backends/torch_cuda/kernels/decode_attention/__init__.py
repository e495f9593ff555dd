"""Attention of sequences with few new tokens each over a paged KV cache, every sequence split over several programs."""

from pagoda.backends.torch_cuda.kernels.decode_attention.api import decode_attention
from pagoda.backends.torch_cuda.kernels.decode_attention.splits import choose_splits

__all__ = ["choose_splits", "decode_attention"]
