"""Pallas kernels for TPU, usable on their own: they need jax and numpy alone. One folder per kernel."""
