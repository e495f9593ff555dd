"""Kernels of mixtures of experts: routing, sorting, and grouped products."""
