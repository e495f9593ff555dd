"""Linear recurrences (Mamba, Mamba-2, lightning attention, KDA) over a ragged batch, states updated in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.linear_recurrence.inputs import RecurrenceInputs
from pagoda.kernels_pallas.linear_recurrence.kernel import recurrence_kernel
from pagoda.kernels_pallas.linear_recurrence.reference import recurrence_reference
from pagoda.kernels_pallas.linear_recurrence.rules import LANES, ChannelDelta, Rule, ScalarDecay, Selective
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

__all__ = ["ChannelDelta", "RecurrenceInputs", "Rule", "ScalarDecay", "Selective", "linear_recurrence"]


def linear_recurrence(
    rule: Rule,
    inputs: RecurrenceInputs,
    states: jax.Array,
    layer: jax.Array | int,
    batch: RecurrentBatch,
    *,
    decode_only: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to every sequence's tokens, from the states in its block; the block then holds those after.

    states: float32 [L, P, J, K, W], updated in place if donated. layer: int32, which of the L to use.

    Static: rule; decode_only (all sequences have one token: the mixed kernel is not built); use_kernel (False: the jnp
    reference, also used where K is no multiple of 8 or W none of 128, which the kernels need); interpret (True or
    pltpu.InterpretParams); chip to compile for.

    Return (float32 [T, J, W], states). Padding tokens give zero, padding sequences change no state.
    Raise ValueError for invalid shapes.
    """
    _, slots, width = inputs.values[0].shape
    expected = slots, inputs.keys[0].shape[2], width
    if states.shape[2:] != expected or any(x.shape != expected for x in inputs.fixed):
        raise ValueError(f"states have shape {states.shape}, the inputs need {expected}")
    if any(width % x.shape[2] for x in inputs.values):
        raise ValueError(f"{width} lanes are no multiple of {[x.shape[2] for x in inputs.values]} heads")
    layer = jnp.asarray(layer, jnp.int32)
    aligned = expected[1] % 8 == 0 and width % LANES == 0
    if not use_kernel or not (aligned or interpret):
        return recurrence_reference(rule, inputs, states, layer, batch, decode_only=decode_only)
    return recurrence_kernel(rule, inputs, states, layer, batch, decode_only=decode_only, interpret=interpret)


# Named static shapes of a call, for compile tests and schedules.


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
