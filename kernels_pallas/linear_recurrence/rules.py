"""The recurrences, each over one token and over a chunk of tokens, in plain jnp that the kernels run.

A slot has a state [K, W] in float32, which each token changes and reads:

    ScalarDecay   S = exp(decay) S + k v; output = q S                 a log decay per head of W / G lanes
                  (Mamba-2, arXiv 2405.21060; lightning attention, arXiv 2401.04658)
    Selective     S = exp(step rate) S + k (step v); output = q S      a rate per row and lane, a step per lane
                  (Mamba, arXiv 2312.00752)
    ChannelDelta  S = exp(decay) S; S = S + k (beta (v - k S)); output = q S        a log decay per row
                  (KDA, arXiv 2510.26692)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.gated_delta.rule import unit_lower_inverses
from pagoda.kernels_pallas.recurrent_state import Arrays

LANES = 128
BLOCK = 16
"""Tokens of a block, within which the keys of `ChannelDelta` decay token by token."""


class Rule(Protocol):
    """A recurrence. Tokens whose keys and values are all 0 change nothing."""

    name: ClassVar[str]
    tile: ClassVar[int]  # tokens of a chunk in the kernel
    lanes: ClassVar[int]  # of the state that a chunk is computed for at a time, at most
    flops: ClassVar[int]  # per token and element of the state

    def token_keys(self, keys: Arrays) -> Arrays:
        """Return what `token` reads of the keys [..., K]."""
        ...

    def token(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the output [1, W] of one token, and the state after it.

        Keys, as of `token_keys`, [K, 1] or [K, W]; values [1, W], those of a head repeated for all its lanes; `fixed`
        [K, W]: what no token changes.
        """
        ...

    def chunk(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the outputs [C, W] of a chunk of C tokens, a power of two, and the state after it.

        Keys [C, K]; values [C, W], or [C, G] with one per head of W / G lanes.
        """
        ...


@dataclass(frozen=True)
class ScalarDecay:
    """Keys q, k; values v [W], log decay [G]."""

    name: ClassVar[str] = "scalar_decay"
    tile: ClassVar[int] = 128
    lanes: ClassVar[int] = 512
    flops: ClassVar[int] = 5

    def token_keys(self, keys: Arrays) -> Arrays:
        """See `Rule`."""
        return keys

    def token(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`."""
        q, k = keys
        v, decay = values
        state = state * jnp.exp(decay) + k * v
        return jnp.sum(q * state, axis=0, keepdims=True), state

    def chunk(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`.

        With G_i the log decay from the start of the chunk to token i

            output_i = exp(G_i) q_i state + sum over j <= i of exp(G_i - G_j) (q_i k_j) v_j
        """
        q, k = keys
        v, decay = values
        size, width = v.shape
        heads = decay.shape[1]
        row, column = _pairs(size)
        since_start = jnp.exp(_dot(jnp.where(column <= row, 1.0, 0.0), decay))
        until_end = jnp.exp(_dot(jnp.where(column > row, 1.0, 0.0), decay))
        scores = jnp.where(column <= row, _dot_rows(q, k), 0.0)
        # G_i - G_j as a sum per pair: the difference of two sums from the start would lose the digits of a small one.
        weights = [scores * jnp.exp(_between(decay[:, head : head + 1])) for head in range(heads)]
        inside = _per_head(weights, v)
        state_read = _dot(q, state) * _of_lanes(since_start, width)
        written = _dot(k.T, v * _of_lanes(until_end, width))
        return inside + state_read, state * _of_lanes(since_start[size - 1 :], width) + written


@dataclass(frozen=True)
class Selective:
    """Keys q, k; values v, step [W]; fixed: rate."""

    name: ClassVar[str] = "selective"
    tile: ClassVar[int] = 64
    lanes: ClassVar[int] = 1024
    flops: ClassVar[int] = 6

    def token_keys(self, keys: Arrays) -> Arrays:
        """See `Rule`."""
        return keys

    def token(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`."""
        q, k = keys
        v, step = values
        (rate,) = fixed
        state = state * jnp.exp(step * rate) + k * (step * v)
        return jnp.sum(q * state, axis=0, keepdims=True), state

    def chunk(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`. A decay per row and lane is no product of matrices: token by token."""
        columns = [key.T for key in keys]
        outputs = []
        for token in range(len(values[0])):
            row = slice(token, token + 1)
            token_keys = tuple(column[:, row] for column in columns)
            token_values = tuple(value[row] for value in values)
            output, state = self.token(token_keys, token_values, fixed, state)
            outputs.append(output)
        return jnp.concatenate(outputs), state


@dataclass(frozen=True)
class ChannelDelta:
    """Keys q, k, log decay; values v [W], beta [1]."""

    name: ClassVar[str] = "channel_delta"
    tile: ClassVar[int] = 128
    lanes: ClassVar[int] = 1 << 20  # all: the triangular system is the same for all lanes
    flops: ClassVar[int] = 7

    def token_keys(self, keys: Arrays) -> Arrays:
        """See `Rule`."""
        q, k, decay = keys
        return q, k, jnp.exp(decay)

    def token(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`."""
        q, k, factor = keys
        v, beta = values
        state = state * factor
        state = state + k * (beta * (v - jnp.sum(k * state, axis=0, keepdims=True)))
        return jnp.sum(q * state, axis=0, keepdims=True), state

    def chunk(self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Rule`.

        With D_i the decay from the start of the chunk to token i, and D_ji that after token j, up to token i, both [K],
        token i adds k_i u_i to the state, where

            u_i = beta_i (v_i - (D_i k_i) state - sum over j < i of (D_ji k_i k_j) u_j)
        """
        q, k, decay = keys
        v, beta = values
        row, column = _pairs(len(v))
        products_q, products_k, since_start, until_end = decayed_products(q, k, decay)
        system = jnp.where(column < row, beta * products_k, 0.0)
        (inverse,) = unit_lower_inverses([system], exact=True)
        written = _dot(inverse, beta * (v - _dot(k * since_start, state)))
        out = _dot(q * since_start, state) + _dot(jnp.where(column <= row, products_q, 0.0), written)
        whole = jnp.exp(jnp.sum(decay.T, axis=1, keepdims=True))
        return out, state * whole + _dot(until_end.T, written)


def decayed_products(q: jax.Array, k: jax.Array, decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return products [C, C] of q and of k of each token with k of those up to it, decayed per channel in between.

    Then the decay from the start to each token, and k decayed to the end [C, K]. q, k and log decay [C, K]. Products
    with later tokens are undefined. Within a block keys decay token by token, and from block to block as a whole, so
    that no decay is the quotient of two others, which may be 0.
    """
    size = len(q)
    block = min(BLOCK, size)
    row, column = _pairs(size)
    same = (row ^ column) < block
    since_block = jnp.exp(_dot(jnp.where(same & (column <= row), 1.0, 0.0), decay))
    until_block = jnp.exp(_dot(jnp.where(same & (column > row), 1.0, 0.0), decay)) * k
    token = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    before = jnp.zeros_like(k)
    prefix = jnp.ones_like(k[:1])
    rows_q = []
    rows_k = []
    since_start = []
    for start in range(0, size, block):
        own = slice(start, start + block)
        both = jnp.concatenate([q[own] * since_block[own], k[own] * since_block[own]])
        products = _dot_rows(both, before)
        rows_q.append(products[:block])
        rows_k.append(products[block:])
        since_start.append(since_block[own] * prefix)
        whole = since_block[start + block - 1 : start + block]
        inside = (token >= start) & (token < start + block)
        before = jnp.where(inside, until_block, before * whole)
        prefix = prefix * whole
    inside_q, inside_k = _products_in_blocks(q, k, jnp.exp(decay), block)
    products_q = jnp.where(same, inside_q, jnp.concatenate(rows_q))
    products_k = jnp.where(same, inside_k, jnp.concatenate(rows_k))
    return products_q, products_k, jnp.concatenate(since_start), before


def _products_in_blocks(q: jax.Array, k: jax.Array, factors: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the products [C, C] of `decayed_products` for pairs of tokens of a block, token by token."""
    size = len(q)
    row, column = _pairs(size)  # row: the earlier token, as products are gathered in columns
    place = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) & (block - 1)
    of_q = jnp.zeros((size, size), jnp.float32)
    of_k = jnp.zeros((size, size), jnp.float32)
    for later in range(block):
        factor, q_later, k_later = (_row_of_blocks(x, later, block) for x in (factors, q, k))
        k = jnp.where(place < later, k * factor, k)
        at = column == (row & -block) + later
        of_q = jnp.where(at, jnp.sum(k * q_later, axis=1, keepdims=True), of_q)
        of_k = jnp.where(at, jnp.sum(k * k_later, axis=1, keepdims=True), of_k)
    return of_q.T, of_k.T


def _row_of_blocks(x: jax.Array, row: int, block: int) -> jax.Array:
    """Return x [C, K] with each row replaced by row `row` of its block."""
    size, width = x.shape
    blocks = x.reshape(size // block, block, width)[:, row : row + 1]
    return jnp.broadcast_to(blocks, (size // block, block, width)).reshape(size, width)


def _between(decay: jax.Array) -> jax.Array:
    """Return G_i - G_j for tokens j <= i, undefined for others: [C, C] from the log decay [C, 1]."""
    row, column = _pairs(len(decay))
    return _dot(jnp.where(column <= row, 1.0, 0.0), jnp.where(column < row, decay, 0.0))


def _per_head(weights: list[jax.Array], v: jax.Array) -> jax.Array:
    """Return the products of each head's weights [C, C] with its lanes of v [C, W], in whole vectors of lanes."""
    width = v.shape[1]
    own = width // len(weights)
    aligned = own % LANES == 0 or LANES % own == 0
    step = max(own, LANES) if aligned else width
    parts = []
    for start in range(0, width, step):
        part = v[:, start : start + step]
        heads = range(start // own, min(start + step, width) // own)
        lane = start + jax.lax.broadcasted_iota(jnp.int32, part.shape, 1)
        products = jnp.zeros_like(part)
        for head in heads:
            of_head = (lane >= head * own) & (lane < (head + 1) * own)
            products = products + _dot(weights[head], part if len(heads) == 1 else jnp.where(of_head, part, 0.0))
        parts.append(products)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _of_lanes(x: jax.Array, width: int) -> jax.Array:
    """Return x [C, G], one column per head, for all lanes of the heads: [C, width], or [C, 1] for one head."""
    heads = x.shape[1]
    if heads == 1:
        return x
    head, lane = (jax.lax.broadcasted_iota(jnp.int32, (heads, width), axis) for axis in (0, 1))
    first = head * (width // heads)
    return _dot(x, jnp.where((lane >= first) & (lane < first + width // heads), 1.0, 0.0))


def _pairs(size: int) -> tuple[jax.Array, jax.Array]:
    """Return the row and the column of each entry of a matrix [size, size]."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return _multiply(a, b, 0)


def _dot_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the products of the rows of a [m, n] with those of b [k, n]: [m, k]."""
    return _multiply(a, b, 1)


def _multiply(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision="highest", preferred_element_type=jnp.float32)
