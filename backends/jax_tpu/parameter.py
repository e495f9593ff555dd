"""One parameter of an NNX module, and what the parts of the decoder need to know when they are built."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    `quantized`: the 8-bit type of the layers' matrices, None where they have `dtype`.
    """

    dtype: jnp.dtype
    tensor: int
    repeats: int | None = None
    scaled_cache: bool = False
    quantized: str | None = None

    def parameter(self, axes: str, *shape: int, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
        """A parameter of this global shape; `axes` has one logical letter per dimension (see `sharding`)."""
        assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
        if self.repeats is not None:
            axes, shape = f"L{axes}", (self.repeats, *shape)
        return kind(jnp.zeros(shape, self.dtype), axes=axes)

    def matrix(self, axes: str, *shape: int) -> tuple[nnx.Param, nnx.Param | None]:
        """A parameter whose last axis is multiplied away, and the float32 scales of its other axes when quantised."""
        if self.quantized is None:
            return self.parameter(axes, *shape), None
        exact = replace(self, dtype=jnp.dtype(jnp.float32))
        return replace(self, dtype=jnp.dtype(self.quantized)).parameter(axes, *shape), exact.parameter(
            axes[:-1], *shape[:-1]
        )


def project(x: jax.Array, weight: jax.Array, scale: nnx.Param | None = None) -> jax.Array:
    """X [T, i] times weight [..., i] -> [T, ...]; `scale` [...]: of a quantised weight.

    The weight keeps its axes and is read as it lies: flattened, XLA would copy one of 8 bits first.
    """
    last = (((1,), (weight.ndim - 1,)), ((), ()))
    if scale is None:
        return jax.lax.dot_general(x, weight, last)
    wide = jax.lax.dot_general(x, weight.astype(x.dtype), last, preferred_element_type=jnp.float32)
    return (wide * scale[...]).astype(x.dtype)


def total(x: jax.Array) -> jax.Array:
    """The sum of every device's part."""
    return jax.lax.psum(x, MODEL)


def local_part(values: jax.Array, size: int) -> jax.Array:
    """This device's `size` of values that are whole everywhere."""
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(MODEL) * size, size)
