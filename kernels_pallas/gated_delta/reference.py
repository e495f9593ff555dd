"""The definition in plain jnp; used by the kernel's tests and off the TPU.

Loops are bounded by `counts`, shapes are static, and the states are updated in place if donated.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.gated_delta.inputs import DeltaInputs
from pagoda.kernels_pallas.gated_delta.rule import HeadChunk, KeyChunk, chunk_rule, token_rule
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

CHUNK = 64


def gated_delta_reference(
    inputs: DeltaInputs, states: jax.Array, layer: jax.Array, batch: RecurrentBatch, *, decode_only: bool
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule. Arguments as `gated_delta`."""
    if batch.drops_states:
        return _mixed(inputs, jnp.zeros(inputs.v.shape, jnp.float32), states, layer, batch)
    out, states = _decode(inputs, states, layer, batch)
    return (out, states) if decode_only else _mixed(inputs, out, states, layer, batch)


def _decode(
    inputs: DeltaInputs, states: jax.Array, layer: jax.Array, batch: RecurrentBatch
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the sequences of one token [T, N, V], zero for all other tokens, and the states."""
    rows = min(inputs.v.shape[0], batch.max_seqs)
    real = jnp.arange(rows) < batch.counts[0]
    before = states[layer, batch.blocks[:rows]]
    before = jnp.where(batch.is_first[:rows, None, None, None], 0, before)
    part = inputs.rows(slice(rows)).by_head()
    columns = part.q[..., None], part.k[..., None]
    rates = part.beta[..., None, None], jnp.exp(part.decay)[..., None, None]
    heads, after = jax.vmap(jax.vmap(token_rule))(*columns, part.v[..., None, :], *rates, before)
    target = jnp.where(real, batch.blocks[:rows], states.shape[1])  # out of bounds: dropped
    out = jnp.zeros(inputs.v.shape, jnp.float32).at[:rows].set(jnp.where(real[:, None, None], heads[:, :, 0], 0))
    return out, states.at[layer, target].set(after, mode="drop")


def _mixed(
    inputs: DeltaInputs, out: jax.Array, states: jax.Array, layer: jax.Array, batch: RecurrentBatch
) -> tuple[jax.Array, jax.Array]:
    """Add the outputs of the other sequences to `out` [T, N, V], chunk by chunk of one sequence at a time."""
    tokens = out.shape[0]
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK)] + [(0, 0)] * (x.ndim - 1)), inputs)
    out = jnp.pad(out, ((0, CHUNK), (0, 0), (0, 0)))

    def sequence(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        begin = batch.query_start[s]
        end = batch.query_start[s + 1]
        state = jnp.where(batch.is_first[s], 0, states[layer, batch.blocks[s]])

        def chunk(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, state = carry
            start = begin + i * CHUNK
            part = jax.tree.map(partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=CHUNK), padded)
            real = start + jnp.arange(CHUNK) < end
            part = part.masked(real).by_head()
            q, k, v, beta, decay = (x.swapaxes(0, 1) for x in (part.q, part.k, part.v, part.beta, part.decay))
            heads, state = jax.vmap(_chunk)(q, k, v, beta, decay, state)
            previous = jax.lax.dynamic_slice_in_dim(out, start, CHUNK)
            merged = jnp.where(real[:, None, None], heads.swapaxes(0, 1), previous)
            return jax.lax.dynamic_update_slice_in_dim(out, merged, start, 0), state

        out, state = jax.lax.fori_loop(0, (end - begin + CHUNK - 1) // CHUNK, chunk, (out, state))
        return out, states if batch.drops_states else states.at[layer, batch.blocks[s]].set(state)

    out, states = jax.lax.fori_loop(batch.counts[0], batch.counts[1], sequence, (out, states))
    return out[:tokens], states


def _chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [C, V] of one head's chunk, and its state. q, k [C, K]; v [C, V]; beta, decay [C]."""
    head = HeadChunk(v=v, beta=beta[:, None], decay=decay[:, None], decay_row=decay[None], state=state)
    return chunk_rule([KeyChunk(q, k, (head,))], exact=True)[0]
