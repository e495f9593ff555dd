"""What the rule reads of the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaInputs:
    """What the rule reads of T tokens, in float32. A key head serves N / K consecutive value heads."""

    q: jax.Array  # [T, K, key dim]
    k: jax.Array  # [T, K, key dim]
    v: jax.Array  # [T, N, value dim]
    beta: jax.Array  # [T, N]: rate at which a value is written
    decay: jax.Array  # [T, N]: log of the factor on the state

    def rows(self, rows: slice) -> DeltaInputs:
        """Return the inputs of some tokens."""
        return jax.tree.map(lambda x: x[rows], self)

    def masked(self, real: jax.Array) -> DeltaInputs:
        """Return the inputs with zeros for tokens that are not `real` [T], which then change nothing."""
        return jax.tree.map(lambda x: jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, 0), self)

    def by_head(self) -> DeltaInputs:
        """Return the inputs with the key heads repeated: one per value head."""
        group = self.v.shape[1] // self.k.shape[1]
        q, k = (jnp.repeat(x, group, axis=1) for x in (self.q, self.k))
        return DeltaInputs(q, k, self.v, self.beta, self.decay)
