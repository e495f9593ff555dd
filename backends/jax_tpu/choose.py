"""Edited logits -> tokens, on the device and without a sort.

top-k and top-p are thresholds. Each is found bit by bit: floats map to integers of the same order, and the largest
threshold that still leaves enough tokens (or enough mass) is built from its highest bit down, in 32 passes over the
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.noise import gumbel

Kind = Literal["greedy", "random", "filtered"]
KINDS: tuple[Kind, ...] = ("greedy", "random", "filtered")
"""What a step's rows need at most: argmax alone; noise; noise within top-k, top-p and min-p."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Per sequence, cut from int32 [7, R]; floats travel as their bits. `rows`: where in the history the token goes."""

    rows: jax.Array
    positions: jax.Array
    keys: jax.Array  # uint32
    temperature: jax.Array
    top_k: jax.Array  # 0 keeps all
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def unpack(cls, packed: jax.Array) -> Rules:
        """The columns of int32 [7, R]."""
        real = jax.lax.bitcast_convert_type(packed, jnp.float32)
        keys = jax.lax.bitcast_convert_type(packed[2], jnp.uint32)
        return cls(packed[0], packed[1], keys, real[3], packed[4], real[5], real[6])


def choose(
    kind: Kind, shown: bool, logits: jax.Array, history: jax.Array, packed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits float32 [R, V], history int32 [rows+1, length] -> tokens int32 [R] and the history with them.

    `shown`: also the logits [R, V] that the tokens were drawn from, after temperature and filters.
    """
    rules = Rules.unpack(packed)
    tokens, drawn = jnp.argmax(logits, -1).astype(jnp.int32), logits
    if kind != "greedy":
        greedy = rules.temperature <= 0
        scaled = logits / jnp.where(greedy, 1.0, rules.temperature)[:, None]
        if kind == "filtered":
            scaled = filtered(scaled, rules)
        noisy = scaled + gumbel(rules.keys, jnp.arange(logits.shape[1], dtype=jnp.uint32))
        tokens = jnp.where(greedy, tokens, jnp.argmax(noisy, -1).astype(jnp.int32))
        drawn = jnp.where(greedy[:, None], logits, scaled)
    return tokens, history.at[rules.rows, rules.positions].set(tokens), drawn if shown else None


def filtered(scaled: jax.Array, rules: Rules) -> jax.Array:
    """-inf for every token outside top-k, top-p or min-p.

    top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass within top-k reaches p, and ties of
    the last; min-p compares with the best token.
    """
    order = ordered(scaled)
    wanted = jnp.where(rules.top_k > 0, jnp.minimum(rules.top_k, scaled.shape[1]), scaled.shape[1])
    kth = largest(lambda floor: (order >= floor[:, None]).sum(-1) >= wanted)
    keep = (order >= kth[:, None]) | (rules.top_k <= 0)[:, None]
    inside = jnp.where(keep, scaled, -jnp.inf)
    probability = jax.nn.softmax(inside)
    best = inside.max(-1, keepdims=True)
    reach = largest(lambda floor: jnp.where(order >= floor[:, None], probability, 0).sum(-1) >= rules.top_p)
    reach = jnp.minimum(reach, ordered(best)[:, 0])  # the best token stays, whatever p
    keep &= (order >= reach[:, None]) | (rules.top_p >= 1)[:, None]
    keep &= scaled >= best + jnp.log(rules.min_p)[:, None]
    return jnp.where(keep, scaled, -jnp.inf)


def ordered(x: jax.Array) -> jax.Array:
    """uint32 in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """uint32 [R]: per row the largest threshold that is `enough`, a property that only falls as thresholds rise."""

    def bit(index: jax.Array, floor: jax.Array) -> jax.Array:
        higher = floor | jnp.uint32(1) << (31 - index).astype(jnp.uint32)
        return jnp.where(enough(higher), higher, floor)

    rows = jax.eval_shape(enough, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape[0]
    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(rows, jnp.uint32))
