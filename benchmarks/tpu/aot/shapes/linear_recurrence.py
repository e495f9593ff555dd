"""Named static shapes of calls of linear_recurrence, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.linear_recurrence import linear_recurrence
from pagoda.kernels_pallas.linear_recurrence.inputs import RecurrenceInputs
from pagoda.kernels_pallas.linear_recurrence.rules import ChannelDelta, Rule, ScalarDecay, Selective
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch


@dataclass(frozen=True)
class RecurrenceArgs:
    """One compiled shape: T tokens of S sequences, J slots with states [K, W]; G heads of a slot."""

    rule: Rule
    tokens: int
    seqs: int
    slots: int
    rows: int  # K
    width: int  # W
    heads: int = 1  # G
    layers: int = 2
    blocks: int = 80
    decode_only: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted with the states donated."""

        def apply(states: jax.Array, inputs: RecurrenceInputs, layer: jax.Array, batch: RecurrentBatch) -> Any:
            return linear_recurrence(self.rule, inputs, states, layer, batch, decode_only=self.decode_only, chip=chip)

        return jax.jit(apply, donate_argnums=0)

    @property
    def input_shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the shapes of the keys, values and fixed arrays."""
        key = (self.tokens, self.slots, self.rows)
        value = (self.tokens, self.slots, self.width)
        per_head = (self.tokens, self.slots, self.heads)
        state = (self.slots, self.rows, self.width)
        match self.rule:
            case Selective():
                return (key,) * 2, (value,) * 2, (state,)
            case ChannelDelta():
                return (key,) * 3, (value, per_head), ()
            case _:
                return (key,) * 2, (value, per_head), ()

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

        inputs = RecurrenceInputs(*(tuple(array(*shape) for shape in shapes) for shapes in self.input_shapes))
        states = array(self.layers, self.blocks, self.slots, self.rows, self.width)
        return states, inputs, array(dtype=jnp.int32), RecurrentBatch.shapes(self.seqs, sharding)


SPECS: dict[str, RecurrenceArgs] = {
    "mamba2-decode": RecurrenceArgs(ScalarDecay(), 64, 64, 1, 128, 1024, 16, decode_only=True),
    "mamba2-decode-whole": RecurrenceArgs(ScalarDecay(), 64, 64, 1, 128, 8192, 128, layers=1, decode_only=True),
    "mamba2-mixed": RecurrenceArgs(ScalarDecay(), 2048, 16, 1, 128, 1024, 16),
    "mamba2-whole": RecurrenceArgs(ScalarDecay(), 512, 8, 1, 256, 3072, 24),
    "lightning-decode": RecurrenceArgs(ScalarDecay(), 64, 64, 8, 128, 128, decode_only=True),
    "lightning-mixed": RecurrenceArgs(ScalarDecay(), 2048, 16, 8, 128, 128),
    "mamba-decode": RecurrenceArgs(Selective(), 64, 64, 1, 16, 8192, decode_only=True),
    "mamba-mixed": RecurrenceArgs(Selective(), 2048, 16, 1, 16, 8192),
    "mamba-sharded": RecurrenceArgs(Selective(), 2048, 16, 1, 16, 640),
    "kda-decode": RecurrenceArgs(ChannelDelta(), 64, 64, 4, 128, 128, decode_only=True),
    "kda-mixed": RecurrenceArgs(ChannelDelta(), 2048, 16, 4, 128, 128),
}
