"""Attention of many query tokens per sequence over the paged cache: prefill, chunked prefill and mixed steps."""

from pagoda.backends.torch_cuda.kernels.prefill_attention.api import prefill_attention
from pagoda.backends.torch_cuda.kernels.prefill_attention.tiles import make_tiles, query_tile

__all__ = ["make_tiles", "prefill_attention", "query_tile"]
