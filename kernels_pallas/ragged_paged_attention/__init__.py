"""Ragged paged attention: prefill and decode rows in one call, K and V written on the way."""

from pagoda.kernels_pallas.ragged_paged_attention.api import ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

__all__ = ["PagedKvLayout", "ragged_paged_attention"]
