"""Top-k, top-p and min-p as one threshold per row, without a sort."""

from pagoda.backends.torch_cuda.kernels.top_k_top_p.api import top_k_top_p

__all__ = ["top_k_top_p"]
