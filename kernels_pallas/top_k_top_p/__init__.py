"""Top-k, top-p and min-p as one logit threshold per row, computed without a sort."""

from pagoda.kernels_pallas.top_k_top_p.api import top_k_top_p

__all__ = ["top_k_top_p"]
