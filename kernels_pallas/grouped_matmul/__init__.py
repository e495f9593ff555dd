"""Rows sorted by group times their group's matrix: the products of a mixture of experts."""

from pagoda.kernels_pallas.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
