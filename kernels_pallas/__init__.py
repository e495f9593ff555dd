"""Pallas kernels for TPU, one folder per kernel. They depend on jax and numpy only and can be used on their own."""
