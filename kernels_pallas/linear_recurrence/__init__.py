"""Linear recurrences (Mamba, Mamba-2, lightning attention, KDA) over a ragged batch, states updated in place."""

from __future__ import annotations

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
