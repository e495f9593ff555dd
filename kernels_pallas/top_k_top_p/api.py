"""The smallest logit that each row keeps under top-k, top-p and min-p: the one entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.top_k_top_p.kernel import kernel

# The definition, in plain jnp: the oracle of the kernel's tests and what runs off the TPU.
#
# Each threshold is found bit by bit: floats map to integers of the same order, and the largest threshold that still
# leaves enough tokens (or enough mass) is built from its highest bit down, in 32 passes over the logits.


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


def top_k_top_p(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> jax.Array:
    """float32 [R]: a row keeps its logits that are at least this; -inf where it keeps all.

    logits float32 [R, V]; temperature float32 [R], positive: what the logits will be divided by; top_k int32 [R], 0 or
    less for no limit; top_p float32 [R], 1 or more for no limit; min_p float32 [R], 0 for no limit.
    top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass within top-k reaches p, and ties of
    the last; min-p keeps what is at least so probable, relative to the best. The best token always stays.
    Static: use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip (what the kernel is
    compiled for). ValueError: shapes or types that do not fit, or a vocabulary too large for the chip's VMEM.
    """
    rows = logits.shape[:1]
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits are {logits.dtype} {logits.shape}, not float32 [R, V]")
    for name, x in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if x.shape != rows:
            raise ValueError(f"{name} has shape {x.shape}, not {rows}")
    if not use_kernel:
        return reference(logits, temperature, top_k, top_p, min_p)
    return kernel(logits, temperature, top_k, top_p, min_p, interpret=interpret, chip=chip)
