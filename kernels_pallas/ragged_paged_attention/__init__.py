"""Ragged paged attention: prefill and decode in one call that also writes K and V to the paged cache."""

from pagoda.kernels_pallas.ragged_paged_attention.api import ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

__all__ = ["PagedKvLayout", "ragged_paged_attention"]
