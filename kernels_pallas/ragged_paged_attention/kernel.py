"""The Pallas kernel."""

from __future__ import annotations

from typing import Any

import jax

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.arguments import Batch, Knobs
from pagoda.kernels_pallas.ragged_paged_attention.layout import KvLayout


def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: Batch,
    knobs: Knobs,
    *,
    layout: KvLayout,
    decode_only: bool,
    interpret: Any,
    chip: ChipInfo,
) -> tuple[jax.Array, jax.Array]:
    """As `api.ragged_paged_attention`."""
    raise NotImplementedError("use_kernel=False until the kernel is in place")
