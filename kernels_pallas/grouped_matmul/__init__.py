"""Grouped matmul: rows sorted by group, each multiplied by its group's matrix, as in a mixture of experts."""

from pagoda.kernels_pallas.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
