"""The Pallas kernels of the gated delta rule: one token of many sequences, and chunks of tokens of any sequences.

Decode: `recurrent_state.decode`.

Mixed: the grid runs over slots (a key head with its value heads), a few at a time, and, inside, over visits: pairs of
a tile of consecutive tokens and a sequence with tokens in it, in order. The state of a sequence stays in VMEM from its
first visit to its last. Tokens of other sequences in the tile are masked, and their outputs preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas import recurrent_state
from pagoda.kernels_pallas.gated_delta.inputs import DeltaInputs
from pagoda.kernels_pallas.gated_delta.rule import HeadChunk, KeyChunk, chunk_rule, token_rule
from pagoda.kernels_pallas.recurrent_state import (
    Arrays,
    RecurrentBatch,
    TileVisits,
    TokenInputs,
    block_bytes,
    join,
    tile_visits,
)

TILE = 128
"""Tokens of a tile: the size of the triangular systems."""
STEP_HEADS = 4
"""Value heads of a grid step, if a slot has no more: their chains of products overlap."""
MIB = 1 << 20


def gated_delta_kernel(
    inputs: DeltaInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: RecurrentBatch,
    *,
    decode_only: bool,
    exact: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernels. Arguments as `gated_delta`."""
    tokens = inputs.v.shape[0]
    decoded = None
    if not batch.drops_states:
        rows = min(tokens, batch.max_seqs)
        decoded, states = decode(inputs.rows(slice(rows)), states, layer, batch, interpret=interpret)
    rest = partial(mixed, inputs, layer=layer, batch=batch, exact=exact, interpret=interpret)
    return join(decoded, states, batch, tokens, None if decode_only else rest)


def decode(
    inputs: DeltaInputs, states: jax.Array, layer: jax.Array, batch: RecurrentBatch, *, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to one token of each of the first counts[0] sequences -> [S, N, V], and the states."""
    lanes = jnp.ones((1, 1, inputs.v.shape[2]), jnp.float32)
    rates = inputs.beta[..., None] * lanes, jnp.exp(inputs.decay)[..., None] * lanes

    def rule(keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = keys
        v, beta, factor = values
        return token_rule(q, k, v, beta, factor, state)

    parts = TokenInputs((inputs.q, inputs.k), (inputs.v, *rates))
    name = "gated_delta_decode"
    return recurrent_state.decode(rule, parts, states, layer, batch, name=name, flops=8, interpret=interpret)


def mixed(
    inputs: DeltaInputs, states: jax.Array, *, layer: jax.Array, batch: RecurrentBatch, exact: bool, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to the other sequences -> [T, N, V], undefined for other tokens, and the states."""
    tokens, heads, width = inputs.v.shape
    key_heads, rows = inputs.k.shape[1:]
    group = heads // key_heads
    pad = -tokens % TILE
    slots = max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and (n == 1 or n * group <= STEP_HEADS))
    visits, num_visits = tile_visits(batch, tokens, TILE)
    q, k, v = (jnp.pad(x, ((0, pad), (0, 0), (0, 0))).swapaxes(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    v = v.reshape(key_heads, group, *v.shape[1:])
    beta, decay = (jnp.pad(x, ((0, pad), (0, 0))).T.reshape(key_heads, group, -1) for x in (inputs.beta, inputs.decay))
    columns = jnp.concatenate([beta, decay], 1).swapaxes(1, 2)  # [K, T, 2 group]

    def body(
        _: Any,
        visits: TileVisits,
        q: Any,
        k: Any,
        v: Any,
        columns: Any,
        decay: Any,
        before: Any,
        out: Any,
        after: Any,
        state: Any,
    ) -> None:
        MixedBody(
            group=group,
            exact=exact,
            visits=visits,
            q=q,
            k=k,
            v=v,
            columns=columns,
            decay=decay,
            before=before,
            out=out,
            after=after,
            state=state,
        ).run()

    def tile_of(*block: int) -> pl.BlockSpec:
        """Return the spec of the slots' tile, whose tokens are the second-last axis."""
        middle = (0,) * (len(block) - 2)
        return pl.BlockSpec((slots, *block), lambda slot, i, _, visits: (slot, *middle, visits.tile[i], 0))

    state_shape = (1, 1, slots * group, rows, width)
    read_state = pl.BlockSpec(state_shape, lambda slot, i, layer, visits: (layer[0], visits.block[i], slot, 0, 0))
    written_state = pl.BlockSpec(
        state_shape, lambda slot, i, layer, visits: (layer[0], batch.target(visits.block[i]), slot, 0, 0)
    )
    row_spec = pl.BlockSpec((slots, group, TILE), lambda slot, i, _, visits: (slot, 0, visits.tile[i]))
    inputs_of_call = (layer[None], visits, q, k, v, columns, decay)
    out, states = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(key_heads // slots, num_visits),
            in_specs=[
                tile_of(TILE, rows),
                tile_of(TILE, rows),
                tile_of(group, TILE, width),
                tile_of(TILE, 2 * group),
                row_spec,
                read_state,
            ],
            out_specs=[tile_of(group, TILE, width), written_state],
            scratch_shapes=[pltpu.VMEM((slots * group, rows, width), jnp.float32)],
        ),
        input_output_aliases={len(jax.tree.leaves(inputs_of_call)): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=32 * MIB + 8 * slots * group * rows * width * 4,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * heads * tokens * (4 * rows * width + 20 * TILE * TILE),
            bytes_accessed=4 * (2 * q.size + 2 * v.size) + 2 * block_bytes(states),
            transcendentals=heads * tokens * TILE,
        ),
        interpret=interpret,
        name="gated_delta_mixed",
    )(*inputs_of_call, states)
    return out.reshape(heads, -1, width).swapaxes(0, 1)[:tokens], states


@dataclass(frozen=True)
class MixedBody:
    """The body of the mixed kernel over its refs; `run` is one visit of some slots."""

    group: int
    exact: bool
    visits: TileVisits  # SMEM
    q: Any  # [slots, TILE, K]
    k: Any  # [slots, TILE, K]
    v: Any  # [slots, group, TILE, V]
    columns: Any  # [slots, TILE, 2 group]: beta and log decay of each head
    decay: Any  # [slots, group, TILE]
    before: Any  # [1, 1, slots * group, K, V]: the state before the sequence's first visit
    out: Any  # [slots, group, TILE, V]
    after: Any  # [1, 1, slots * group, K, V]
    state: Any  # [slots * group, K, V] scratch

    def run(self) -> None:
        """Apply the rule to the sequence's tokens of the tile."""
        visit = pl.program_id(1)
        slots = range(self.q.shape[0])
        low = self.visits.low[visit]
        high = self.visits.high[visit]

        @pl.when(self.visits.start[visit] != 0)
        def _() -> None:
            zero = self.visits.zero[visit] != 0
            self.state[...] = jnp.where(zero, 0.0, self.before[0, 0])

        token = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        own = (token >= low) & (token < high)
        results = chunk_rule([self.chunk(slot, own, low, high) for slot in slots], exact=self.exact)
        for head, (heads, after) in enumerate(results):
            slot, index = divmod(head, self.group)
            previous = jnp.where(self.visits.new_tile[visit] != 0, 0.0, self.out[slot, index])
            self.out[slot, index] = jnp.where(own, heads, previous)
            self.state[head] = after
        self.after[0, 0] = self.state[...]

    def chunk(self, slot: int, own: jax.Array, low: Any, high: Any) -> KeyChunk:
        """Return the tokens of a slot, those of other sequences as zeros."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
        own_lane = (lane >= low) & (lane < high)

        def rate(column: int) -> jax.Array:
            return jnp.where(own, self.columns[slot, :, column : column + 1], 0.0)

        heads = tuple(
            HeadChunk(
                jnp.where(own, self.v[slot, head], 0.0),
                rate(head),
                rate(self.group + head),
                jnp.where(own_lane, self.decay[slot, head : head + 1, :], 0.0),
                self.state[slot * self.group + head],
            )
            for head in range(self.group)
        )
        return KeyChunk(jnp.where(own, self.q[slot], 0.0), jnp.where(own, self.k[slot], 0.0), heads)
