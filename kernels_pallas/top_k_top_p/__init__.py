"""Top-k, top-p and min-p as one logit threshold per row, computed without a sort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.top_k_top_p.kernel import top_k_top_p_kernel


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
    """Return the threshold float32 [R]: each row keeps the logits that are at least this; -inf: it keeps all.

    logits: float32 [R, V].
    temperature: float32 [R], positive; the logits will be divided by it.
    top_k: int32 [R], 0 or less: no limit. Ties of the k-th value are kept.
    min_p: float32 [R], 0: no limit. Keeps tokens at least that probable relative to the most probable one.
    top_p: float32 [R], 1 or more: no limit. Keeps the fewest tokens whose mass within top-k and min-p reaches p, and
    ties.
    The most probable token is always kept.

    Static: use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip to compile for.
    Raise ValueError for invalid shapes or dtypes, or a vocabulary too large for the chip's VMEM.
    """
    rows = logits.shape[:1]
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits are {logits.dtype} {logits.shape}, not float32 [R, V]")
    for name, x in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if x.shape != rows:
            raise ValueError(f"{name} has shape {x.shape}, expected {rows}")
    if not use_kernel:
        return reference(logits, temperature, top_k, top_p, min_p)
    return top_k_top_p_kernel(logits, temperature, top_k, top_p, min_p, interpret=interpret, chip=chip)


def reference(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """The definition in plain jnp; used by the kernel's tests and off the TPU. Arguments as `top_k_top_p`.

    Each threshold is built bit by bit: floats map to integers of the same order, and the largest threshold that keeps
    enough tokens (or mass) is determined from its highest bit down, in 32 passes over the logits.
    """
    order = ordered(logits)
    best = logits.max(-1)
    k = jnp.minimum(top_k, logits.shape[1])
    kth = jnp.where(top_k > 0, largest(lambda threshold: (order >= threshold[:, None]).sum(-1) >= k), 0)
    min_p_threshold = jnp.where(min_p > 0, best + temperature * jnp.log(jnp.minimum(min_p, 1)), -jnp.inf)
    floor = jnp.maximum(kth, ordered(min_p_threshold))
    inside = jnp.where(order >= floor[:, None], (logits - best[:, None]) / temperature[:, None], -jnp.inf)
    probability = jax.nn.softmax(inside)
    nucleus = largest(lambda threshold: jnp.where(order >= threshold[:, None], probability, 0).sum(-1) >= top_p)
    nucleus = jnp.where(top_p < 1, jnp.minimum(nucleus, ordered(best)), 0)  # always keeps the best token
    kept = jnp.where(order >= jnp.maximum(kth, nucleus)[:, None], logits, jnp.inf).min(-1)
    limited = (top_k > 0) | (top_p < 1)
    return jnp.maximum(jnp.where(limited, kept, -jnp.inf), min_p_threshold)


def ordered(x: jax.Array) -> jax.Array:
    """Map float32 to uint32 in the same order; -0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return uint32 [R]: the largest threshold per row that is `enough`, which must be monotone in the threshold."""

    def set_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | jnp.uint32(1) << (31 - index).astype(jnp.uint32)
        return jnp.where(enough(higher), higher, threshold)

    rows = jax.eval_shape(enough, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape[0]
    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(rows, jnp.uint32))
