"""One parameter of an NNX module, and what the parts of the decoder need to know when they are built."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.sharding import MODEL


class Stack(nnx.Param):
    """A parameter of all repeats of a layer, of which a kernel reads its own: a slice made for it would be a copy."""


@dataclass(frozen=True, slots=True)
class Build:
    """How the decoder is built: `dtype` of weights and activations, `tensor` devices per layer, `repeats` of a layer.

    Parameters of a layer are stacked over its repeats. `scaled_cache`: K and V are stored divided by a scale.
    """

    dtype: jnp.dtype
    tensor: int
    repeats: int | None = None
    scaled_cache: bool = False

    def parameter(self, axes: str, *shape: int, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
        """A parameter of this global shape; `axes` has one logical letter per dimension (see `sharding`)."""
        assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
        if self.repeats is not None:
            axes, shape = f"L{axes}", (self.repeats, *shape)
        return kind(jnp.zeros(shape, self.dtype), axes=axes)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """X [T, i] times weight [..., i] -> [T, ...]; one product of two matrices, the weight read as it lies."""
    product = jax.lax.dot_general(x, weight.reshape(-1, weight.shape[-1]), (((1,), (1,)), ((), ())))
    return product.reshape(x.shape[0], *weight.shape[:-1])


def total(x: jax.Array) -> jax.Array:
    """The sum of every device's part."""
    return jax.lax.psum(x, MODEL)


def local_part(values: jax.Array, size: int) -> jax.Array:
    """This device's `size` of values that are whole everywhere."""
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(MODEL) * size, size)
