"""From pooled hidden states to raw answers: dense layers and a classifier, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu import norm
from pagoda.backends.jax_tpu.ffn import ACTIVATIONS
from pagoda.backends.jax_tpu.parameter import Build
from pagoda.common.models import spec as models

_ACTIVATIONS: Final[dict[models.PoolerActivation, Callable[[jax.Array], jax.Array]]] = {
    "silu": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": ACTIVATIONS["relu"],
    "tanh": jnp.tanh,
}


class Pooler(nnx.Module):
    """`build`: of float32 parameters."""

    def __init__(self, spec: models.Pooler, width: int, build: Build) -> None:
        widths = [width, *(dense.width for dense in spec.dense)]
        self.kind = spec.kind
        self.dense = nnx.List([Dense(dense, before, build) for dense, before in zip(spec.dense, widths)])
        labels = spec.classifier
        self.classifier = None if labels is None else Product(labels.labels, widths[-1], labels.bias, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Float32 [R, D] -> [R, n]."""
        for dense in self.dense:
            rows = dense(rows)
        return rows if self.classifier is None else self.classifier(rows)


class Product(nnx.Module):
    """`weight` [n, D] and `bias` [n]."""

    def __init__(self, out: int, width: int, bias: bool, build: Build) -> None:
        self.weight = build.parameter("..", out, width)
        self.bias = build.parameter(".", out) if bias else None

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        out = jnp.matmul(rows, self.weight[...].T, precision="highest")
        return out if self.bias is None else out + self.bias[...]


class Dense(nnx.Module):
    """A product, an activation and a norm."""

    def __init__(self, spec: models.Dense, width: int, build: Build) -> None:
        self.spec = spec
        self.product = Product(spec.width, width, spec.bias, build)
        self.norm = norm.make_norm(spec.norm, spec.width, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        rows = self.product(rows)
        if self.spec.activation is not None:
            rows = _ACTIVATIONS[self.spec.activation](rows)
        return norm.apply(self.norm, rows)
