"""The definition in plain jnp; used by the kernels' tests and off the TPU.

Loops are bounded by `counts`, shapes are static, and the states are updated in place if donated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.linear_recurrence.inputs import RecurrenceInputs
from pagoda.kernels_pallas.linear_recurrence.rules import Rule
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch


def recurrence_reference(
    rule: Rule,
    inputs: RecurrenceInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: RecurrentBatch,
    *,
    decode_only: bool,
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule. Arguments as `linear_recurrence`."""
    if batch.drops_states:
        out = jnp.zeros(inputs.values[0].shape, jnp.float32)
        return _mixed(rule, inputs, out, states, layer, batch)
    out, states = _decode(rule, inputs, states, layer, batch)
    return (out, states) if decode_only else _mixed(rule, inputs, out, states, layer, batch)


def _decode(
    rule: Rule, inputs: RecurrenceInputs, states: jax.Array, layer: jax.Array, batch: RecurrentBatch
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the sequences of one token [T, J, W], zero for all other tokens, and the states."""
    shape = inputs.values[0].shape
    rows = min(shape[0], batch.max_seqs)
    real = jnp.arange(rows) < batch.counts[0]
    before = states[layer, batch.blocks[:rows]]
    before = jnp.where(batch.is_first[:rows, None, None, None], 0, before)
    part = inputs.rows(slice(rows)).of_lanes()
    keys = tuple(key[..., None] for key in rule.token_keys(part.keys))
    values = tuple(value[..., None, :] for value in part.values)
    slots = jax.vmap(rule.token)
    heads, after = jax.vmap(slots, in_axes=(0, 0, None, 0))(keys, values, part.fixed, before)
    target = jnp.where(real, batch.blocks[:rows], states.shape[1])  # out of bounds: dropped
    out = jnp.zeros(shape, jnp.float32).at[:rows].set(jnp.where(real[:, None, None], heads[:, :, 0], 0))
    return out, states.at[layer, target].set(after, mode="drop")


def _mixed(
    rule: Rule,
    inputs: RecurrenceInputs,
    out: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    batch: RecurrentBatch,
) -> tuple[jax.Array, jax.Array]:
    """Add the outputs of the other sequences to `out` [T, J, W], token by token."""
    lanes = inputs.of_lanes()
    all_keys = rule.token_keys(inputs.keys)

    def sequence(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        state = jnp.where(batch.is_first[s], 0, states[layer, batch.blocks[s]])

        def token(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, state = carry
            keys = tuple(x[t][..., None] for x in all_keys)
            values = tuple(x[t][:, None] for x in lanes.values)
            row, state = jax.vmap(rule.token)(keys, values, lanes.fixed, state)
            return out.at[t].set(row[:, 0]), state

        out, state = jax.lax.fori_loop(batch.query_start[s], batch.query_start[s + 1], token, (out, state))
        return out, states if batch.drops_states else states.at[layer, batch.blocks[s]].set(state)

    return jax.lax.fori_loop(batch.counts[0], batch.counts[1], sequence, (out, states))
