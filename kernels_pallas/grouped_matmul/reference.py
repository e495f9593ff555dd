"""The definition: XLA's ragged product, one per part. What runs off the TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    rows: jax.Array, weights: jax.Array, layer: jax.Array, sizes: jax.Array, *, transposed: bool, out_dtype: Any
) -> jax.Array:
    """As `api.grouped_matmul`: rows [M, I], weights [L, E, parts, I, O], sizes [E] -> [parts, M, O]."""
    own = weights[layer].swapaxes(-1, -2) if transposed else weights[layer]
    products = [
        jax.lax.ragged_dot(rows, own[:, part], sizes, preferred_element_type=jnp.float32)
        for part in range(own.shape[1])
    ]
    return jnp.stack(products).astype(out_dtype)
