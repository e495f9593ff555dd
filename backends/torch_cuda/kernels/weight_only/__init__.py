"""Linear maps with 8-bit or 4-bit matrices."""

from pagoda.backends.torch_cuda.kernels.weight_only.api import weight_only_linear
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix, Scheme, pack, unpack

__all__ = ["PackedMatrix", "Scheme", "pack", "unpack", "weight_only_linear"]
