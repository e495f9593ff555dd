"""RMSNorm and LayerNorm, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.parameter import Build
from pagoda.common.models import spec as models


class Norm(nnx.Module):
    """A norm over the last axis D."""

    def __init__(self, spec: models.Norm, width: int, build: Build) -> None:
        self.spec = spec
        self.weight = build.parameter("D", width)
        self.bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D], in x's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return normalise(x, self.spec, self.weight[...], bias)


def normalise(x: jax.Array, spec: models.Norm, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Norm of x [..., D] over its last axis; weight and bias [D]. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    return scaled(wide, jnp.square(wide).mean(-1, keepdims=True), spec, weight, bias).astype(x.dtype)


def scaled(
    wide: jax.Array, mean_square: jax.Array, spec: models.Norm, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """float32 x divided by its root mean square, times the weight, plus the bias."""
    wide = wide * jax.lax.rsqrt(mean_square + spec.eps)
    factor = weight.astype(jnp.float32)
    wide = wide * (factor + 1 if spec.unit_offset else factor)
    return wide if bias is None else wide + bias.astype(jnp.float32)


def make_norm(spec: models.Norm | None, width: int, build: Build) -> Norm | None:
    """The norm's module, or None."""
    return None if spec is None else Norm(spec, width, build)


def apply(norm: Norm | None, x: jax.Array) -> jax.Array:
    """The norm of x, or x where there is none."""
    return x if norm is None else norm(x)
