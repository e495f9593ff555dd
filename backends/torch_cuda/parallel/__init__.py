"""Tensor parallelism: ranks, their communication, and the sharding of parameters."""
