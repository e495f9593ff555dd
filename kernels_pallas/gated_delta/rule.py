"""The gated delta rule (arXiv 2412.06464) of one head, over a chunk of tokens and over one token.

A state S [K, V] is read and written by each token, with its key k, value v, rate beta and log decay:

    S = exp(log decay) S;  S = S + k (beta (v - k S));  output = q S

Over a chunk that is a unit lower triangular system (section 3.3 there). All functions are plain jnp in float32, which
both the reference and the Pallas kernel run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KeyChunk:
    """C tokens of one key head, a power of two, and of the value heads it serves.

    A token with k, beta and log decay 0 changes nothing.
    """

    q: jax.Array  # [C, K]
    k: jax.Array  # [C, K]
    heads: tuple[HeadChunk, ...]


@dataclass(frozen=True)
class HeadChunk:
    """The tokens of one value head."""

    v: jax.Array  # [C, V]
    beta: jax.Array  # [C, 1]
    decay: jax.Array  # log decay [C, 1]
    decay_row: jax.Array  # the same log decay [1, C]
    state: jax.Array  # [K, V], before the chunk


def chunk_rule(chunks: Sequence[KeyChunk], *, exact: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Return the outputs [C, V] of each value head, and its state after the chunk.

    With G_i the log decay from the start of the chunk to token i, token i adds k_i u_i to the state, where

        u_i = beta_i (v_i - exp(G_i) k_i state - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j)

    The heads are independent: each step is done for all of them, so that the products of one fill the latency of
    another's. `exact`: see `multiply`.
    """
    size = len(chunks[0].q)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    seen = column <= row
    before = column < row
    dot = partial(multiply, exact=exact)
    heads = [head for chunk in chunks for head in chunk.heads]
    stacked = [(jnp.concatenate([chunk.q, chunk.k]), chunk.k) for chunk in chunks]
    shared = [(both, k, dot(both, k, ROWS)) for both, k in stacked]  # by all value heads of a key head
    rows = [each for each, chunk in zip(shared, chunks) for _ in chunk.heads]
    scores = [score for _, _, score in rows]
    # G_i - G_j as a sum per pair: the difference of two sums from the start would lose the digits of a small one.
    ones = jnp.where(before, 1.0, 0.0)
    sums = [sum_pairs(jnp.where(seen, head.decay_row, 0.0), ones) for head in heads]
    between = [jnp.where(seen, jnp.exp(each), 0.0) for each in sums]
    since_start = [jnp.exp(each[:, :1] + head.decay[:1]) for each, head in zip(sums, heads)]
    systems = [
        jnp.where(before, head.beta * score[size:] * decay, 0.0) for head, score, decay in zip(heads, scores, between)
    ]
    inverses = unit_lower_inverses(systems, exact=exact)
    read = [dot(both, head.state) for (both, _, _), head in zip(rows, heads)]  # by q, by k
    wanted = [head.beta * (head.v - decay * x[size:]) for head, decay, x in zip(heads, since_start, read)]
    written = [dot(inverse, x) for inverse, x in zip(inverses, wanted)]
    inner = [dot(score[:size] * decay, x) for score, decay, x in zip(scores, between, written)]
    added = [dot(k.T * decay[size - 1 :], x) for (_, k, _), decay, x in zip(rows, between, written)]
    return [
        (decay * x[:size] + y, decay[size - 1 :] * head.state + z)
        for decay, x, y, head, z in zip(since_start, read, inner, heads, added)
    ]


def token_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output [1, V] of one token, and the state [K, V] after it.

    q, k [K, 1] or [K, V]; v, beta, decay (the factor on the state) [1, V].
    """
    state = state * decay
    written = beta * (v - jnp.sum(k * state, axis=0, keepdims=True))
    state = state + k * written
    return jnp.sum(q * state, axis=0, keepdims=True), state


def unit_lower_inverses(lowers: Sequence[jax.Array], *, exact: bool) -> list[jax.Array]:
    """Return the inverse of I + lower, for strictly lower triangular matrices whose size is a power of two.

    Blocks on the diagonal are inverted at sizes 1, 2, 4 ...: [[A, 0], [B, C]] has the inverse
    [[1/A, 0], [-1/C B 1/A, 1/C]]. A series in powers of `lower` would need as many products, but its terms grow and
    cancel.
    """
    shape = lowers[0].shape
    dot = partial(multiply, exact=exact)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    inverses = [jnp.where(row == column, 1.0, 0.0)] * len(lowers)
    for level in range(shape[0].bit_length() - 1):
        same_block = ((row ^ column) >> (level + 1)) == 0
        below = same_block & (((row >> level) & 1) == 1) & (((column >> level) & 1) == 0)
        blocks = [jnp.where(below, lower, 0.0) for lower in lowers]
        if level > 0:
            halves = [dot(inverse, block) for inverse, block in zip(inverses, blocks)]
            blocks = [dot(half, inverse) for half, inverse in zip(halves, inverses)]
        inverses = [inverse - block for inverse, block in zip(inverses, blocks)]
    return inverses


PLAIN = ((1,), (0,))
ROWS = ((1,), (1,))
"""Contracted axes: of the product of two matrices, and of the rows of the first with those of the second."""


def multiply(
    a: jax.Array, b: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]] = PLAIN, *, exact: bool
) -> jax.Array:
    """Return the product of two float32 matrices.

    `exact`: with float32 operands, six passes of the matrix unit. Else with the leading 16 bits of each, an error of
    about 1e-5 of the product in three passes; enough for inputs that were bfloat16.
    """
    if exact:
        return _product(a, b, contract, "highest")
    a_high, a_low = split(a, 2)
    b_high, b_low = split(b, 2)
    small = _product(a_high, b_low, contract) + _product(a_low, b_high, contract)
    return _product(a_high, b_high, contract) + small


def sum_pairs(a: jax.Array, ones: jax.Array) -> jax.Array:
    """Return the product of a float32 matrix with one of zeros and ones, exact in three passes."""
    mask = ones.astype(jnp.bfloat16)
    high, middle, low = (_product(part, mask, PLAIN) for part in split(a, 3))
    return high + (middle + low)


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Return bfloat16 arrays whose sum is float32 x, but for bits beyond the first 8 * parts."""
    result: list[jax.Array] = []
    for _ in range(parts):
        result.append(x.astype(jnp.bfloat16))
        x = x - result[-1].astype(jnp.float32)
    return result


def _product(
    a: jax.Array, b: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]], precision: str = "default"
) -> jax.Array:
    return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
