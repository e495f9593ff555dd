"""What a recurrence reads of the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.recurrent_state import Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrenceInputs:
    """T tokens in J slots, in float32; which keys and values a rule has, `rules` tells."""

    keys: Arrays  # [T, J, K] each
    values: Arrays  # the first [T, J, W]; others too, or [T, J, G] with one per head of W / G lanes
    fixed: Arrays = ()  # [J, K, W] each

    @property
    def per_token(self) -> tuple[Arrays, Arrays]:
        """Return the keys and values."""
        return self.keys, self.values

    def rows(self, rows: slice) -> RecurrenceInputs:
        """Return the inputs of some tokens."""
        keys, values = jax.tree.map(lambda x: x[rows], self.per_token)
        return RecurrenceInputs(keys, values, self.fixed)

    def of_lanes(self) -> RecurrenceInputs:
        """Return the inputs with the values of a head repeated for all its lanes."""
        width = self.values[0].shape[2]
        values = tuple(jnp.repeat(x, width // x.shape[2], axis=2) for x in self.values)
        return RecurrenceInputs(self.keys, values, self.fixed)
