"""QK norm, rotation and the write of keys and values into the paged cache, in one pass over the projections."""

from pagoda.backends.torch_cuda.kernels.rope_cache.api import NormWeights, rope_and_cache

__all__ = ["NormWeights", "rope_and_cache"]
