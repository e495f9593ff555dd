"""Bidirectional softmax attention of pooling models, in plain XLA: every token of a prompt sees those around it."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.step_input import PoolInput
from pagoda.common.models.mixers import Attention

_LOW: Final = -1e30  # initial running maximum: finite, so that exp(-inf - _LOW) is 0 instead of NaN


def attend_bidirectionally(
    step: PoolInput, q: jax.Array, k: jax.Array, v: jax.Array, spec: Attention, slopes: jax.Array | None
) -> jax.Array:
    """Attend within each prompt, q [T, N, H], k [T, K, H] and v [T, K, V] -> [T, N, V], in tiles with online softmax.

    Key tiles that no query of a tile may attend to are skipped. The cost of a prompt and the memory for scores do not
    depend on the other prompts. `slopes` [N]: of ALiBi.
    """
    tile = step.shape.tile
    key_begin, key_end = _key_range(step, spec)
    values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)  # the column of ones sums the weights

    def attend_tile(start: jax.Array) -> jax.Array:
        queries = _rows(q, start, tile).reshape(tile, k.shape[1], -1, k.shape[2])
        begins = _rows(key_begin, start, tile)[:, None]
        ends = _rows(key_end, start, tile)[:, None]

        def add_keys(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            old_max, acc = state
            first = index * tile
            scores = jnp.einsum("tkgh,skh->kgts", queries, _rows(k, first, tile), preferred_element_type=jnp.float32)
            scores = scores * spec.scale
            if spec.softcap is not None:
                scores = jnp.tanh(scores / spec.softcap) * spec.softcap
            key = first + jnp.arange(tile)
            if slopes is not None:
                distance = jnp.abs(start + jnp.arange(tile)[:, None] - key)
                scores = scores - slopes.reshape(*queries.shape[1:3], 1, 1) * distance
            scores = jnp.where((key >= begins) & (key < ends), scores, -jnp.inf)
            new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
            weights = jnp.exp(scores - new_max).astype(v.dtype)
            tile_values = _rows(values, first, tile)
            new = jnp.einsum("kgts,skh->kgth", weights, tile_values, preferred_element_type=jnp.float32)
            return new_max, acc * jnp.exp(old_max - new_max) + new

        groups = queries.shape[1:3]
        initial = jnp.full((*groups, tile, 1), _LOW), jnp.zeros((*groups, tile, values.shape[-1]), jnp.float32)
        last = (ends[-1, 0] + tile - 1) // tile
        _, acc = jax.lax.fori_loop(begins[0, 0] // tile, last, add_keys, initial)
        return (acc[..., :-1] / acc[..., -1:]).astype(q.dtype).transpose(2, 0, 1, 3)

    return jax.lax.map(attend_tile, jnp.arange(0, len(q), tile, dtype=jnp.int32)).reshape(*q.shape[:2], -1)


def _key_range(step: PoolInput, spec: Attention) -> tuple[jax.Array, jax.Array]:
    """Return the range of keys [begin, end) each token attends to; both are non-decreasing."""
    token = jnp.arange(step.shape.tokens, dtype=jnp.int32)
    begin = step.starts
    end = step.ends
    if spec.window is not None:
        begin = jnp.maximum(begin, token - spec.window + 1)
        end = jnp.minimum(end, token + spec.window)
    return begin, end


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)
