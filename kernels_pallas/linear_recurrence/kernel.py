"""The Pallas kernels of a recurrence: one token of many sequences, and chunks of tokens of any sequences.

Decode: `recurrent_state.decode`.

Mixed: the grid runs over parts (a slot, or some of its lanes) and, inside, over the visits of a step: pairs of a tile
of consecutive tokens and a sequence with tokens in it, in order. The state of a sequence stays in VMEM from its first
visit to its last. Tokens of other sequences in the tile are masked, and their outputs preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas import recurrent_state
from pagoda.kernels_pallas.linear_recurrence.inputs import RecurrenceInputs
from pagoda.kernels_pallas.linear_recurrence.rules import LANES, Rule
from pagoda.kernels_pallas.recurrent_state import (
    RecurrentBatch,
    TileVisits,
    TokenInputs,
    block_bytes,
    join,
    tile_visits,
)

MIB = 1 << 20


def recurrence_kernel(
    rule: Rule,
    inputs: RecurrenceInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: RecurrentBatch,
    *,
    decode_only: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernels. Arguments as `linear_recurrence`."""
    tokens = inputs.values[0].shape[0]
    decoded = None
    if not batch.drops_states:
        rows = min(tokens, batch.max_seqs)
        decoded, states = decode(rule, inputs.rows(slice(rows)), states, layer, batch, interpret=interpret)
    rest = partial(mixed, rule, inputs, layer=layer, batch=batch, interpret=interpret)
    return join(decoded, states, batch, tokens, None if decode_only else rest)


def decode(
    rule: Rule, inputs: RecurrenceInputs, states: jax.Array, layer: jax.Array, batch: RecurrentBatch, *, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to one token of each of the first counts[0] sequences -> [S, J, W], and the states."""
    parts = TokenInputs(rule.token_keys(inputs.keys), inputs.of_lanes().values, inputs.fixed)
    name = f"{rule.name}_decode"
    return recurrent_state.decode(
        rule.token, parts, states, layer, batch, name=name, flops=rule.flops, interpret=interpret
    )


def lanes_at_a_time(rule: Rule, width: int, heads: int) -> int:
    """Return the lanes of a part: whole heads and vectors, as many as the rule takes; all if none divides them."""
    unit = lcm(LANES, width // heads)
    fitting = [lanes for lanes in range(unit, min(rule.lanes, width) + 1, unit) if width % lanes == 0]
    return max(fitting, default=width)


def mixed(
    rule: Rule, inputs: RecurrenceInputs, states: jax.Array, *, layer: jax.Array, batch: RecurrentBatch, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to the other sequences -> [T, J, W], undefined for other tokens, and the states."""
    tokens, slots, width = inputs.values[0].shape
    rows = inputs.keys[0].shape[2]
    tile = rule.tile
    lanes = lanes_at_a_time(rule, width, min(x.shape[2] for x in inputs.values))
    splits = width // lanes
    pad = -tokens % tile
    visits, num_visits = tile_visits(batch, tokens, tile)

    def of_parts(x: jax.Array, parts: int) -> tuple[jax.Array, pl.BlockSpec]:
        """Return [T, J, X], of which `parts` parts of a slot have a share each, in whole tiles; and a tile's spec.

        A share of whole vectors of lanes is fetched where it is, others are brought together first.
        """
        share = x.shape[2] // parts
        of_part = splits // parts
        x = jnp.pad(x, ((0, pad), (0, 0), (0, 0))).reshape(tokens + pad, slots * parts, share)
        if share % LANES == 0 or slots * parts == 1:
            block = pl.BlockSpec((tile, share), lambda part, i, _, visits: (visits.tile[i], _divide(part, of_part)[0]))
            return x.reshape(tokens + pad, -1), block
        block = pl.BlockSpec(
            (None, tile, share), lambda part, i, _, visits: (_divide(part, of_part)[0], visits.tile[i], 0)
        )
        return x.swapaxes(0, 1), block

    def read_index(part: Any, i: Any, layer: Any, visits: TileVisits) -> tuple[Any, ...]:
        slot, split = _divide(part, splits)
        return layer[0], visits.block[i], slot, 0, split

    def written_index(part: Any, i: Any, layer: Any, visits: TileVisits) -> tuple[Any, ...]:
        slot, split = _divide(part, splits)
        return layer[0], batch.target(visits.block[i]), slot, 0, split

    def fixed_index(part: Any, *_: Any) -> tuple[Any, ...]:
        slot, split = _divide(part, splits)
        return slot, 0, split

    fixed = pl.BlockSpec((1, rows, lanes), fixed_index)
    read_state = pl.BlockSpec((1, 1, 1, rows, lanes), read_index)
    written_state = pl.BlockSpec((1, 1, 1, rows, lanes), written_index)
    keys = [of_parts(x, 1) for x in inputs.keys]
    values = [of_parts(x, splits) for x in inputs.values]
    key_arrays, key_specs = zip(*keys)
    value_arrays, value_specs = zip(*values)
    arrays = (key_arrays, value_arrays, inputs.fixed)
    first_value = value_arrays[0]

    def body(
        _: Any,
        visits: TileVisits,
        keys: tuple[Any, ...],
        values: tuple[Any, ...],
        fixed: tuple[Any, ...],
        before: Any,
        out: Any,
        after: Any,
        state: Any,
    ) -> None:
        RecurrenceBody(
            rule=rule,
            visits=visits,
            keys=keys,
            values=values,
            fixed=fixed,
            before=before,
            out=out,
            after=after,
            state=state,
        ).run()

    out, states = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct(first_value.shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(slots * splits, num_visits),
            in_specs=[key_specs, value_specs, (fixed,) * len(inputs.fixed), read_state],
            out_specs=[value_specs[0], written_state],
            scratch_shapes=[pltpu.VMEM((rows, lanes), jnp.float32)],
        ),
        input_output_aliases={len(jax.tree.leaves((layer, visits, arrays))): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=32 * MIB + 8 * rows * lanes * 4,
        ),
        cost_estimate=pl.CostEstimate(
            flops=rule.flops * tokens * slots * rows * width,
            bytes_accessed=4 * sum(x.size for x in jax.tree.leaves((arrays, first_value))) + 2 * block_bytes(states),
            transcendentals=slots * splits * tokens * tile,
        ),
        interpret=interpret,
        name=f"{rule.name}_mixed",
    )(layer[None], visits, *arrays, states)
    out = out if out.ndim == 2 else out.swapaxes(0, 1)
    return out[:tokens].reshape(tokens, slots, width), states


def _divide(part: Any, share: int) -> tuple[Any, Any]:
    """Return quotient and remainder; of Python's operators, rounding of negative numbers needs a TPU to compile."""
    return (part, 0) if share == 1 else (jax.lax.div(part, share), jax.lax.rem(part, share))


@dataclass(frozen=True)
class RecurrenceBody:
    """The body of the mixed kernel over its refs; `run` is one visit of one part."""

    rule: Rule
    visits: TileVisits  # SMEM
    keys: tuple[Any, ...]  # [tile, K]
    values: tuple[Any, ...]  # [tile, lanes or heads]
    fixed: tuple[Any, ...]  # [1, K, lanes]
    before: Any  # [1, 1, 1, K, lanes]: the state before the sequence's first visit
    out: Any  # [tile, lanes]
    after: Any  # [1, 1, 1, K, lanes]
    state: Any  # [K, lanes] scratch

    def run(self) -> None:
        """Apply the rule to the sequence's tokens of the tile."""
        visit = pl.program_id(1)

        @pl.when(self.visits.start[visit] != 0)
        def _() -> None:
            zero = self.visits.zero[visit] != 0
            self.state[...] = jnp.where(zero, 0.0, self.before[0, 0, 0])

        token = jax.lax.broadcasted_iota(jnp.int32, (self.rule.tile, 1), 0)
        own = (token >= self.visits.low[visit]) & (token < self.visits.high[visit])
        keys, values = (tuple(jnp.where(own, x[...], 0.0) for x in refs) for refs in (self.keys, self.values))
        heads, state = self.rule.chunk(keys, values, tuple(x[0] for x in self.fixed), self.state[...])
        previous = jnp.where(self.visits.new_tile[visit] != 0, 0.0, self.out[...])
        self.out[...] = jnp.where(own, heads, previous)
        self.state[...] = state
        self.after[0, 0, 0] = state
