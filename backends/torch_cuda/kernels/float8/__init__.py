"""float8 e4m3fn: its definition in torch, and what Triton kernels share to write and read it."""

from pagoda.backends.torch_cuda.kernels.float8.reference import LARGEST, quantised_rows, saturated

__all__ = ["LARGEST", "quantised_rows", "saturated"]
