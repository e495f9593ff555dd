"""RMSNorm and LayerNorm, with the residual addition before and float8 rounding after."""

from pagoda.backends.torch_cuda.kernels.norm.api import norm, norm_quantised

__all__ = ["norm", "norm_quantised"]
