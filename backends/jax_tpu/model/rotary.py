"""Rotary positions from two small exact tables instead of one long one.

A position is high * SPAN + low, and cos(a + b) = cos a cos b - sin a sin b. The tables are made in float64, so angles
stay exact at any length, where float32 positions times frequencies would be off by 1e-2 at 100k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.common.models.rope import inverse_frequencies
from pagoda.common.models.spec import ModelSpec, Rope

SPAN: Final = 512


@dataclass(frozen=True, slots=True)
class JaxRotation:
    """cos and sin float32 [T, 1, dim/2] of one step's tokens; channel i of the first `dim` pairs with i + dim/2."""

    cos: jax.Array
    sin: jax.Array
    dim: int

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, n, H] -> [T, n, H].

        The partners, with their signs, are a product with a permutation: exact, and next to nothing for a matrix unit,
        where halves of a TPU's 128 lanes cost copies of x into another layout and back.
        """
        rest = x.shape[-1] - self.dim
        cos = jnp.pad(jnp.concatenate([self.cos, self.cos], -1), [(0, 0), (0, 0), (0, rest)], constant_values=1)
        sin = jnp.pad(jnp.concatenate([self.sin, self.sin], -1), [(0, 0), (0, 0), (0, rest)])
        partners = jnp.einsum("tnh,hg->tng", x, _partners(x, self.dim), preferred_element_type=jnp.float32)
        return (x.astype(jnp.float32) * cos + partners * sin).astype(x.dtype)


def _partners(x: jax.Array, dim: int) -> jax.Array:
    """[H, H] of x's dtype: takes [first half, second half, rest] to [-second half, first half, 0]."""
    half, channel = dim // 2, np.arange(dim // 2)
    matrix = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    matrix[channel + half, channel] = -1
    matrix[channel, channel + half] = 1
    return jnp.asarray(matrix, x.dtype)


def ropes(spec: ModelSpec) -> tuple[Rope, ...]:
    """The distinct ropes of a model, in order of appearance."""
    return tuple(dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None))


def table_shape(rope: Rope, max_len: int) -> tuple[int, int, int]:
    """(rows, dim/2, 2): SPAN low angles, then the high ones; cos and sin."""
    return SPAN + -(-max_len // SPAN), rope.dim // 2, 2


def table(rope: Rope, max_len: int) -> npt.NDArray[np.float32]:
    """The table of `table_shape`; the attention factor is in the low rows."""
    frequencies, factor = inverse_frequencies(rope, max_len)
    low = np.arange(SPAN)[:, None] * frequencies
    high = np.arange(-(-max_len // SPAN))[:, None] * (SPAN * frequencies)
    pairs = [np.stack([np.cos(angle), np.sin(angle)], -1) for angle in (low, high)]
    return np.concatenate([pairs[0] * factor, pairs[1]]).astype(np.float32)


def rotation(rows: jax.Array, positions: jax.Array) -> JaxRotation:
    """The rotation at positions int32 [T], from a table."""
    low, high = rows[positions % SPAN], rows[SPAN + positions // SPAN]
    cos = low[..., 0] * high[..., 0] - low[..., 1] * high[..., 1]
    sin = low[..., 1] * high[..., 0] + low[..., 0] * high[..., 1]
    return JaxRotation(cos[:, None], sin[:, None], 2 * rows.shape[1])
