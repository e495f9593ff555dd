"""The Pallas kernel of one token of many sequences, for any rule that changes a state per head.

The grid runs over groups of sequences, so that the chains of operations of one fill the latency of another's. The
states of a group are fetched by their block numbers while the group before is computed, and are written back to the
same blocks.

A rule reads keys as columns [K, 1], the same for all lanes of a state. Copying a column to all lanes in the vector unit
takes about three cycles per vector, more than everything else. Here the matrix unit does it: a key is split into three
bfloat16 numbers whose sum it is, and one product of the transposed parts with ones adds them up in each lane. All
products are with 1 or 0, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.recurrent_state.batch import RecurrentBatch

LANES = 128
COLUMNS = 40
"""Keys that are transposed at a time: the lanes hold three parts of each."""
PARTS = 3
GROUP = 4
"""Sequences of a grid step, at most."""
MIB = 1 << 20
GROUP_BYTES = MIB
"""States of a group, at most, unless one sequence has more."""

Arrays: TypeAlias = tuple[jax.Array, ...]


class TokenRule(Protocol):
    """Return the output [1, W] of one token, and the state [K, W] after it.

    Keys [K, W], each column the same; values [1, W]; fixed [K, W]: what no token changes.
    """

    def __call__(
        self, keys: Arrays, values: Arrays, fixed: Arrays, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class TokenInputs:
    """What a rule reads of one token of S sequences, in float32. Each of I keys serves J / I of the J states."""

    keys: Arrays  # [S, I, K] each
    values: Arrays  # [S, J, W] each
    fixed: Arrays = ()  # [J, K, W] each


def decode(
    rule: TokenRule,
    inputs: TokenInputs,
    states: jax.Array,
    layer: jax.Array,
    batch: RecurrentBatch,
    *,
    name: str,
    flops: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to one token of each of the first counts[0] sequences -> [S, J, W], and the states.

    states [L, P, J, K, W] float32. name: of the kernel. flops: per element of a state. Rows of other sequences are
    undefined.
    """
    count, slots, width = inputs.values[0].shape
    size = group_size(count, block_bytes(states))
    pad = -count % size
    group = slots // inputs.keys[0].shape[1]
    keys = _rows(inputs.keys)
    columns = min(keys.shape[1], COLUMNS)
    keys, *values = (jnp.pad(x, ((0, pad), (0, 0), (0, 0))) for x in (keys, *inputs.values))
    scalars = (jnp.pad(x[:count].astype(jnp.int32), (0, pad)) for x in (batch.blocks, batch.is_first))

    def body(
        layer: Any,
        count: Any,
        blocks: Any,
        first: Any,
        keys: Any,
        values: tuple[Any, ...],
        fixed: tuple[Any, ...],
        _: Any,
        out: Any,
        after: Any,
        selectors: Any,
        fetched_states: Any,
        new_states: Any,
        fetched: Any,
        written: Any,
    ) -> None:
        transfers = StateTransfers(
            size=size,
            count=count[0],
            layer=layer[0],
            blocks=blocks,
            cache=after,
            before=fetched_states,
            after=new_states,
            fetched=fetched,
            written=written,
        )
        step = pl.program_id(0)
        pl.when(step == 0)(lambda: _fill_selectors(selectors, columns))
        transfers.begin()
        for index in range(size):
            fresh = first[step * size + index] != 0
            before, result = transfers.states(index)
            column = Columns(keys[index], selectors, columns, states.shape[3])
            for slot in range(slots):
                at = slot // group * len(inputs.keys)
                own = tuple(column(at + each) for each in range(len(inputs.keys)))
                for start in range(0, width, LANES):
                    lanes = slice(start, min(start + LANES, width))
                    state = jnp.where(fresh, 0.0, before[slot, :, lanes])
                    out[index, pl.ds(slot, 1), lanes], result[slot, :, lanes] = rule(
                        tuple(x[:, : lanes.stop - start] for x in own),
                        tuple(x[index, pl.ds(slot, 1), lanes] for x in values),
                        tuple(x[slot, :, lanes] for x in fixed),
                        state,
                    )
        transfers.end()

    def of_group(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((size, *x.shape[1:]), lambda i, *_: (i, 0, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0, 0, 0))

    arrays = (keys, tuple(values), inputs.fixed)
    buffer = pltpu.VMEM((2, size, *states.shape[2:]), jnp.float32)
    used = sum(2 * x[:size].size * 4 for x in (keys, *values, values[0])) + sum(2 * x.size * 4 for x in inputs.fixed)
    out, states = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct(values[0].shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(batch.counts[0], size),),
            in_specs=[
                of_group(keys),
                tuple(map(of_group, values)),
                tuple(map(whole, inputs.fixed)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[of_group(values[0]), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((LANES, columns * LANES), jnp.bfloat16),
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={4 + len(jax.tree.leaves(arrays)): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=4 * size * block_bytes(states) + used + 16 * MIB,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops * count * block_bytes(states) // 4,
            bytes_accessed=2 * count * block_bytes(states),
            transcendentals=count * block_bytes(states) // 4 if inputs.fixed else 0,
        ),
        interpret=interpret,
        name=name,
    )(layer[None], batch.counts[:1], *scalars, *arrays, states)
    return out[:count], states


def join(
    decoded: jax.Array | None,
    states: jax.Array,
    batch: RecurrentBatch,
    tokens: int,
    mixed: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [T, J, W] of all tokens, zero for padding, and the states.

    decoded: of the sequences of one token, as of `decode` (None: there are none, as the states are dropped). mixed:
    applies the rule to the others (None: there are none) from the states -> [T, J, W], undefined for other tokens, and
    the states.
    """
    if decoded is None:
        assert mixed is not None, "a batch has sequences of one kind"
        out, states = mixed(states)
        return jnp.where(jnp.arange(tokens)[:, None, None] < batch.query_start[batch.counts[1]], out, 0), states
    decoded = jnp.pad(decoded, ((0, tokens - len(decoded)), (0, 0), (0, 0)))
    token = jnp.arange(tokens)[:, None, None]
    out = jnp.where(token < batch.counts[0], decoded, 0)
    if mixed is None:
        return out, states
    mixed_out, states = mixed(states)
    last = batch.query_start[batch.counts[1]]
    return jnp.where((token >= batch.counts[0]) & (token < last), mixed_out, out), states


def group_size(count: int, state_bytes: int) -> int:
    """Return how many of `count` sequences one grid step takes. `state_bytes`: of the states of one sequence."""
    return max(1, min(count, GROUP, GROUP_BYTES // state_bytes))


def block_bytes(states: jax.Array) -> int:
    """Return the bytes of one sequence's states in one layer."""
    return 4 * states[0, 0].size


@dataclass(frozen=True)
class StateTransfers:
    """The states of the groups between HBM and two buffers each way; those of one step."""

    size: int  # sequences of a group
    count: Any  # all sequences
    layer: Any
    blocks: Any  # SMEM
    cache: Any  # [L, P, J, K, W] in HBM
    before: Any  # [2, size, J, K, W]
    after: Any  # [2, size, J, K, W]
    fetched: Any  # DMA semaphores [2]
    written: Any  # DMA semaphores [2]

    def states(self, index: int) -> tuple[Any, Any]:
        """Return the refs [J, K, W] of a sequence's states before and after the step."""
        buffer = _parity(pl.program_id(0))
        return self.before.at[buffer, index], self.after.at[buffer, index]

    def begin(self) -> None:
        """Start to fetch the next group; return when this one is there, and the buffer for its results is free."""
        step = pl.program_id(0)
        steps = pl.num_programs(0)
        pl.when(step == 0)(lambda: self._each(0, self._fetch, start=True))
        pl.when(step + 1 < steps)(lambda: self._each(step + 1, self._fetch, start=True))
        self._each(step, self._fetch, start=False)
        pl.when(step >= 2)(lambda: self._each(step - 2, self._write, start=False))

    def end(self) -> None:
        """Start to write the results; in the last step, return when all are written."""
        step = pl.program_id(0)
        steps = pl.num_programs(0)
        self._each(step, self._write, start=True)

        @pl.when(step + 1 == steps)
        def _() -> None:
            pl.when(step >= 1)(lambda: self._each(step - 1, self._write, start=False))
            self._each(step, self._write, start=False)

    def _each(self, step: Any, copy: Callable[[Any, int], Any], *, start: bool) -> None:
        """Start the copies of a group, or wait for them."""
        for index in range(self.size):

            @pl.when(step * self.size + index < self.count)
            def _(index: int = index) -> None:
                (copy(step, index).start if start else copy(step, index).wait)()

    def _fetch(self, step: Any, index: int) -> Any:
        buffer = _parity(step)
        block = self.blocks[step * self.size + index]
        return pltpu.make_async_copy(
            self.cache.at[self.layer, block], self.before.at[buffer, index], self.fetched.at[buffer]
        )

    def _write(self, step: Any, index: int) -> Any:
        buffer = _parity(step)
        block = self.blocks[step * self.size + index]
        return pltpu.make_async_copy(
            self.after.at[buffer, index], self.cache.at[self.layer, block], self.written.at[buffer]
        )


def _parity(step: Any) -> Any:
    return jax.lax.rem(step, 2)


def _rows(keys: Arrays) -> jax.Array:
    """Return the keys as rows [S, keys * I, K], those of a state side by side, padded to whole vectors and blocks."""
    count, _, size = keys[0].shape
    rows = jnp.stack(keys, 2).reshape(count, -1, size)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 8), (0, -size % LANES)))
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % min(rows.shape[1], COLUMNS)), (0, 0)))


def _fill_selectors(selectors: Any, columns: int) -> None:
    """Write [LANES, columns * LANES]: for each column, ones in the rows of its three parts."""
    row = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    for column in range(columns):
        part = sum((row == part * columns + column for part in range(1, PARTS)), row == column)
        selectors[:, column * LANES : (column + 1) * LANES] = jnp.where(part, 1.0, 0.0).astype(jnp.bfloat16)


class Columns:
    """The keys of a sequence as columns that are copied to all lanes; made in pairs, which fill a matrix unit."""

    def __init__(self, rows: jax.Array, selectors: Any, columns: int, size: int) -> None:
        """Rows [blocks * columns, LANES or more]; `size` of the lanes are used."""
        self._selectors = selectors
        self._columns = columns
        self._blocks = [_transposed_parts(rows[at : at + columns])[:size] for at in range(0, len(rows), columns)]
        self._pairs: dict[int, jax.Array] = {}

    def __call__(self, index: int) -> jax.Array:
        """Return column `index` in all lanes [size, LANES]."""
        pair = index // 2
        if pair not in self._pairs:
            block, column = divmod(2 * pair, self._columns)
            selector = self._selectors[:, column * LANES : (column + 2) * LANES]
            self._pairs[pair] = jnp.dot(self._blocks[block], selector, preferred_element_type=jnp.float32)
        return self._pairs[pair][:, :LANES] if index % 2 == 0 else self._pairs[pair][:, LANES:]


def _transposed_parts(rows: jax.Array) -> jax.Array:
    """Return the parts of rows [n, K], whose sum they are, as columns of bfloat16 [K, LANES]."""
    parts = []
    for _ in range(PARTS):
        parts.append(rows.astype(jnp.bfloat16).astype(jnp.float32))
        rows = rows - parts[-1]
    parts.append(jnp.zeros((LANES - PARTS * len(rows), rows.shape[1]), jnp.float32))
    return jnp.concatenate(parts).T.astype(jnp.bfloat16)
