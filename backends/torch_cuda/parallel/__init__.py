"""Tensor parallelism: ranks, their communication, and which part of each array a rank holds."""
