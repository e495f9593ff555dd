"""Kernels of linear maps: packed and quantised matrices, rounded activations, low-rank adapters."""
