"""A routed mixture of experts: tokens sorted by expert, one grouped product over all of them.

Every device holds a share of each expert's width, so that no token has to travel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.ffn import activate
from pagoda.backends.jax_tpu.layout import padded
from pagoda.backends.jax_tpu.parameter import Build, project, total
from pagoda.common.models.spec import Moe, Router


class MoeFfn(nnx.Module):
    """`router` [E, D]; `inner` [E, D, 2F], gate and up side by side within each device's share; `down` [E, F, D]."""

    def __init__(self, spec: Moe, width: int, build: Build) -> None:
        expert, inner = spec.expert, padded(spec.expert.width, build.tensor)
        parts = 2 if expert.gated else 1
        self.spec = spec
        self.router = build.parameter("ED", spec.experts, width)
        self.inner = build.parameter("EDF.", spec.experts, width, inner, parts)
        self.inner_bias = build.parameter("EF.", spec.experts, inner, parts) if expert.bias else None
        self.down = build.parameter("EFD", spec.experts, inner, width)
        self.down_bias = build.parameter("ED", spec.experts, width) if expert.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D]."""
        tokens, top = x.shape[0], self.spec.router.top_k
        weights, chosen = route(project(x, self.router[...]), self.spec.router)
        order = jnp.argsort(chosen.reshape(-1))
        owner = order // top  # the token of each (token, expert) pair, sorted by expert
        expert = chosen.reshape(-1)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=self.spec.experts).astype(jnp.int32)
        out = self._experts(x[owner], expert, sizes) * weights.reshape(-1)[order, None]
        return total(jnp.zeros((tokens, x.shape[1]), jnp.float32).at[owner].add(out).astype(x.dtype))

    def _experts(self, rows: jax.Array, expert: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows [T*k, D] sorted by expert -> float32 [T*k, D], this device's part of the sum."""
        experts, width, share, parts = self.inner.shape
        both = jax.lax.ragged_dot(rows, self.inner[...].reshape(experts, width, share * parts), sizes)
        both = both.reshape(-1, share, parts)
        if self.inner_bias is not None:
            both = both + self.inner_bias[...][expert]
        hidden = activate(self.spec.expert, both.swapaxes(1, 2))
        out = jax.lax.ragged_dot(hidden, self.down[...], sizes, preferred_element_type=jnp.float32)
        if self.down_bias is not None:
            first = jax.lax.axis_index("model") == 0
            out = out + jnp.where(first, self.down_bias[...][expert].astype(jnp.float32), 0)
        return out


def route(logits: jax.Array, spec: Router) -> tuple[jax.Array, jax.Array]:
    """Weights float32 [T, k] and expert numbers int32 [T, k] from router logits [T, E]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), spec.top_k)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts
