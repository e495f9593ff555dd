"""Attention of sequences with few new tokens each over a paged KV cache, every sequence split over several programs."""

from pagoda.backends.torch_cuda.kernels.decode_attention.api import choose_splits, decode_attention

__all__ = ["choose_splits", "decode_attention"]
