"""Feed-forward blocks: one MLP, split over the devices along its width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
from flax import nnx

from pagoda.backends.jax_tpu.layout import padded
from pagoda.backends.jax_tpu.parameter import Build, project, total
from pagoda.common.models.spec import Activation, Mlp

ACTIVATIONS: Final[dict[Activation, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MlpFfn(nnx.Module):
    """`inner` [2, F, D]: gate and up when gated, else [1, F, D]; `down` [D, F]. F is padded with zeros."""

    def __init__(self, spec: Mlp, width: int, build: Build) -> None:
        inner = padded(spec.width, build.tensor)
        parts = 2 if spec.gated else 1
        self.spec = spec
        self.inner, self.inner_scale = build.matrix(".FD", parts, inner, width)
        self.inner_bias = build.parameter(".F", parts, inner) if spec.bias else None
        self.down, self.down_scale = build.matrix("DF", width, inner)
        self.down_bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D]."""
        both = project(x, self.inner[...], self.inner_scale)
        if self.inner_bias is not None:
            both = both + self.inner_bias[...]
        out = total(project(activate(self.spec, both), self.down[...], self.down_scale))
        return out if self.down_bias is None else out + self.down_bias[...]


def activate(spec: Mlp, parts: jax.Array) -> jax.Array:
    """Parts [T, 2 or 1, F] -> [T, F]."""
    hidden = ACTIVATIONS[spec.activation](parts[:, 0])
    return hidden * parts[:, 1] if spec.gated else hidden
