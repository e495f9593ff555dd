"""Kernels of norms and activations."""
