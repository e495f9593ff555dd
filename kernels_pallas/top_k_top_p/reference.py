"""The definition, in plain jnp: the oracle of the kernel's tests and what runs off the TPU.

Each threshold is found bit by bit: floats map to integers of the same order, and the largest threshold that still
leaves enough tokens (or enough mass) is built from its highest bit down, in 32 passes over the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def reference(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """As `api.top_k_top_p`: logits [R, V], temperature, top_k, top_p, min_p [R] -> float32 [R]."""
    order = ordered(logits)
    best = logits.max(-1)
    wanted = jnp.minimum(top_k, logits.shape[1])
    kth = jnp.where(top_k > 0, largest(lambda floor: (order >= floor[:, None]).sum(-1) >= wanted), 0)
    inside = jnp.where(order >= kth[:, None], (logits - best[:, None]) / temperature[:, None], -jnp.inf)
    probability = jax.nn.softmax(inside)
    reach = largest(lambda floor: jnp.where(order >= floor[:, None], probability, 0).sum(-1) >= top_p)
    reach = jnp.where(top_p < 1, jnp.minimum(reach, ordered(best)), 0)  # the best token stays, whatever p
    least = jnp.where(min_p > 0, best + temperature * jnp.log(jnp.minimum(min_p, 1)), -jnp.inf)
    kept = jnp.where(order >= jnp.maximum(kth, reach)[:, None], logits, jnp.inf).min(-1)
    limited = (top_k > 0) | (top_p < 1)
    return jnp.maximum(jnp.where(limited, kept, -jnp.inf), least)


def ordered(x: jax.Array) -> jax.Array:
    """uint32 in the order of the float32 values, the two zeros equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """uint32 [R]: per row the largest threshold that is `enough`, a property that only falls as thresholds rise."""

    def bit(index: jax.Array, floor: jax.Array) -> jax.Array:
        higher = floor | jnp.uint32(1) << (31 - index).astype(jnp.uint32)
        return jnp.where(enough(higher), higher, floor)

    rows = jax.eval_shape(enough, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape[0]
    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(rows, jnp.uint32))
