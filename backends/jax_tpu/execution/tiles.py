"""Small arrays of a block, flat, in whole tiles of a TPU's registers.

If the last two axes of an array do not fill tiles, a TPU stores it with other axes there, such as that of the blocks,
to save memory. XLA then copies the array twice in each step, to have the numbers of a block side by side.
"""

from __future__ import annotations

from math import prod
from typing import Final

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.model.slots import LANES, padded

_SUBLANES: Final = 8
"""Rows of a tile of float32."""


def tiled_shape(count: int) -> tuple[int, int]:
    """Return the shape [rows, 128] of the whole tiles that hold `count` numbers of a block."""
    return padded(-(-count // LANES), _SUBLANES), LANES


def read_tiles(stack: jax.Array, layer: jax.Array, blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the numbers [S, *shape] of blocks int32 [S] of a stack [L, P, rows, 128]."""
    return stack[layer, blocks].reshape(len(blocks), -1)[:, : prod(shape)].reshape(-1, *shape)


def write_tiles(stack: jax.Array, layer: jax.Array, blocks: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return the stack with numbers [S, ...] in blocks int32 [S]; numbers of blocks outside the stack are dropped."""
    flat = numbers.reshape(len(blocks), -1)
    room = stack.shape[2] * stack.shape[3]
    tiles = jnp.pad(flat, ((0, 0), (0, room - flat.shape[1]))).reshape(-1, *stack.shape[2:])
    return stack.at[layer, blocks].set(tiles, mode="drop")
