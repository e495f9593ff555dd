"""Rotary position embeddings from two small tables instead of one long one.

A position is high * SPAN + low, and cos(a + b) = cos a cos b - sin a sin b. The tables are computed in float64, so
angles are accurate at any length; float32 position times frequency would be off by 1e-2 at 100k tokens.
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
    """The rotation of one step's tokens. Channel i of the first `dim` is paired with channel i + dim/2."""

    cos: jax.Array  # float32 [T, 1, dim/2]
    sin: jax.Array  # float32 [T, 1, dim/2]
    dim: int

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate x [T, n, H].

        Halves are swapped by a matmul with a signed permutation: exact, and cheap on the matrix unit. Slicing halves of
        the TPU's 128 lanes would copy x to another layout and back.
        """
        unrotated = x.shape[-1] - self.dim
        cos = jnp.pad(jnp.concatenate([self.cos, self.cos], -1), [(0, 0), (0, 0), (0, unrotated)], constant_values=1)
        sin = jnp.pad(jnp.concatenate([self.sin, self.sin], -1), [(0, 0), (0, 0), (0, unrotated)])
        swapped = jnp.einsum("tnh,hg->tng", x, _swap_matrix(x, self.dim), preferred_element_type=jnp.float32)
        return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _swap_matrix(x: jax.Array, dim: int) -> jax.Array:
    """Return [H, H] of x's dtype that maps [first half, second half, tail] to [-second half, first half, 0]."""
    half, channel = dim // 2, np.arange(dim // 2)
    matrix = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    matrix[channel + half, channel] = -1
    matrix[channel, channel + half] = 1
    return jnp.asarray(matrix, x.dtype)


def ropes(spec: ModelSpec) -> tuple[Rope, ...]:
    """Return the distinct ropes of a model, in order of appearance."""
    return tuple(dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None))


def table_shape(rope: Rope, max_len: int) -> tuple[int, int, int]:
    """Return the table's shape (rows, dim/2, 2): SPAN rows of low angles, then the high angles; cos and sin."""
    return SPAN + -(-max_len // SPAN), rope.dim // 2, 2


def table(rope: Rope, max_len: int) -> npt.NDArray[np.float32]:
    """Return the table of `table_shape`. The attention factor is multiplied into the low rows."""
    frequencies, factor = inverse_frequencies(rope, max_len)
    low = np.arange(SPAN)[:, None] * frequencies
    high = np.arange(-(-max_len // SPAN))[:, None] * (SPAN * frequencies)
    pairs = [np.stack([np.cos(angle), np.sin(angle)], -1) for angle in (low, high)]
    return np.concatenate([pairs[0] * factor, pairs[1]]).astype(np.float32)


def rotation(table: jax.Array, positions: jax.Array) -> JaxRotation:
    """Return the rotation at positions int32 [T], from a table."""
    low, high = table[positions % SPAN], table[SPAN + positions // SPAN]
    cos = low[..., 0] * high[..., 0] - low[..., 1] * high[..., 1]
    sin = low[..., 1] * high[..., 0] + low[..., 0] * high[..., 1]
    return JaxRotation(cos[:, None], sin[:, None], 2 * table.shape[1])
