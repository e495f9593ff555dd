"""The Pallas kernel body, with a decode and a mixed variant.

The grid runs over tiles of queries: a decode tile has a few sequences of one token, a mixed tile consecutive tokens of
any sequences. Within a tile the kernel visits each sequence, and for each the KV blocks it attends to:

    for tile:                       Pallas' pipeline moves queries and outputs
        for sequence in tile:       a mixed tile masks the rows of its other sequences
            for block of pages:     fetched one step ahead, across sequences and tiles, into one of two buffers
                for heads, passes:  online softmax (flash attention, arXiv 2205.14135), base 2

`transfers` has the DMAs, `attend` the arithmetic of one pass, `PassStream` the order of passes of the mixed variant.

New K and V are copied from HBM to their pages by DMA, one tile ahead of the reads. All heads of a group are rows of one
matmul. On devices with two TensorCores (v5p) each runs all tiles for half of the lane heads: within a core tiles must
run in order, because fetches and writes run ahead from tile to tile.
The idea of a decode and a mixed specialisation in one ragged call is from Ragged Paged Attention (arXiv 2604.15464);
layout, schedule and code are our own. The body uses no `ref.reshape` and no `ref.bitcast`, which
`pltpu.InterpretParams` does not support.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pagoda.kernels_pallas.ragged_paged_attention.attend import (
    Alibi,
    ColumnLogits,
    ColumnSoftmax,
    Mask,
    Stage,
    State,
    attend_rows,
    column_chains,
    columns,
)
from pagoda.kernels_pallas.ragged_paged_attention.plan import KernelPlan, Static, TileSpan, ceil_div, div, rem
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

LOG2E = math.log2(math.e)

PassPosition = tuple[Any, Any]  # block, pair within the block


@dataclass(frozen=True)
class AttentionKernelBody:
    """The kernel body over its refs; `run` is one grid step."""

    plan: KernelPlan
    q: Any  # [sub, heads, M, W] VMEM; mixed: [heads, parts, W, n], M = parts * n
    sinks: Any  # as state.top, VMEM, or None
    slopes: Any  # as state.top, VMEM, or None
    out: Any  # as q
    transfers: Transfers
    state: State
    stages: Any  # two `Stage`s, None in the decode variant
    slot: Any  # [1] SMEM: the buffer of the next block

    def run(self) -> None:
        """Compute one tile."""
        tile = self.plan.tile

        def begin() -> None:
            self.slot[0] = 0
            self.transfers.write(0)
            self.transfers.wait_written(0)
            first, _ = self.plan.sequences(0)
            self.transfers.fetch(first, self.plan.span(0, first), 0, 0)
            if not self.plan.static.decode:
                self.state.clear()

        pl.when(tile == 0)(begin)
        pl.when(tile + 1 < self.plan.scalars.tiles)(lambda: self.transfers.write(tile + 1))
        first, end = self.plan.sequences(tile)
        shared = True if self.plan.static.decode else jnp.logical_not(self.fills(self.plan.span(tile, first)))
        pl.when(shared)(self.clear_out)

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)
            index = seq - first if self.plan.static.decode else 0
            if self.plan.static.decode:
                self.state.clear()
                jax.lax.fori_loop(0, span.blocks, partial(self.block, tile, seq, span, index), None)
            else:
                self.attend_mixed(tile, seq, span)
            self.store(span, index)

        jax.lax.fori_loop(first, end, sequence, None)

    def clear_out(self) -> None:
        """Zero the outputs: padding tokens give zero."""
        self.out[...] = jnp.zeros_like(self.out)

    def block(self, tile: Any, seq: Any, span: TileSpan, index: Any, block: Any, _: Any) -> None:
        """Decode: start the next fetch, wait for this block of pages, attend."""
        slot = self.slot[0]
        self.transfers.fetch_next(tile, seq, span, block, 1 - slot)
        start = (span.page_low + block * self.plan.static.blocks.pages) * self.plan.static.layout.page_size
        tokens = jnp.minimum(span.kv_end - start, self.plan.static.block_tokens)
        self.transfers.wait_fetched(tokens, slot)
        self.transfers.clear_tail(tokens, slot)
        unit = self.plan.static.blocks.tokens
        one_pass = lambda i, _: self.attend(index, slot, i, self.mask(span, start + i * unit))  # noqa: E731
        jax.lax.fori_loop(0, ceil_div(tokens, unit), one_pass, None)
        self.slot[0] = 1 - slot

    def attend(self, index: Any, slot: Any, pass_index: Any, mask: Mask) -> None:
        """Decode: run one pass over the buffer, for every lane head."""
        static = self.plan.static
        unrolled = self.plan.static.blocks.heads
        kv = self.transfers.kv.at[slot]

        def attend_group(group: Any, _: Any) -> None:
            for part in range(unrolled):
                h = group * unrolled + part
                k, v = static.load(kv, static.layout, static.blocks.tokens, pass_index, group * unrolled, part)
                attend_rows(self.q.at[index, h], k, v, self.state, h, self.softcap(), self.alibi(h, mask), mask)

        groups = static.layout.lane_heads // unrolled
        if groups == 1:
            attend_group(0, None)
        else:
            jax.lax.fori_loop(0, groups, attend_group, None)

    def attend_mixed(self, tile: Any, seq: Any, span: TileSpan) -> None:
        """Mixed: process all blocks of a sequence."""
        slot = self.slot[0]
        stream = PassStream(
            static=self.plan.static,
            transfers=self.transfers,
            span=span,
            q=self.q,
            state=self.state,
            stages=self.stages,
            softcap=self.softcap(),
            alibi=self.alibi,
            mask=partial(self.mask, span),
            first_slot=slot,
            fetch_next=partial(self.transfers.fetch_next, tile, seq, span),
        )
        stream.run()
        self.slot[0] = stream.slot(span.blocks)

    def softcap(self) -> Any:
        """Return the softcap in base 2, or None."""
        return self.plan.scalars.numbers[0] if self.plan.static.softcapped else None

    def alibi(self, h: Any, mask: Mask) -> Alibi | None:
        """Return what ALiBi does to the logits of lane head `h`, or None."""
        static = self.plan.static
        return Alibi(self.slopes.at[h], mask, static.rules.alibi_root) if static.has_slopes else None

    def mask(self, span: TileSpan, start: Any) -> Mask:
        """Return the mask of a pass from `start`. The first query of a mixed tile may be of another sequence."""
        window = self.plan.scalars.window if self.plan.static.windowed else None
        chunk = self.plan.static.rules.chunk
        lookback = self.plan.static.rules.lookback
        low = None if chunk is None else self.plan.chunk_start(span.position)
        if self.plan.static.decode:
            return Mask(start, span.position, 1, window, chunk, low, lookback, self.plan.static.quarters)
        return Mask(
            start,
            span.position + self.plan.first_token(self.plan.tile) - span.low,
            self.plan.static.blocks.queries,
            window,
            chunk,
            low,
            lookback,
        )

    def store(self, span: TileSpan, index: Any) -> None:
        """Normalise and store the outputs of this sequence; the mixed variant also resets the state."""
        heads = self.plan.static.layout.lane_heads
        if self.plan.static.decode:
            jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index), None)
            return
        fills = self.fills(span)
        pl.when(fills)(lambda: jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index), None))
        pl.when(jnp.logical_not(fills))(
            lambda: jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index, span), None)
        )

    def fills(self, span: TileSpan) -> Any:
        """True if a sequence's tokens fill a mixed tile."""
        return span.high - span.low == self.plan.static.blocks.queries

    def store_head(self, h: Any, index: Any, part: TileSpan | None = None) -> None:
        """Store one lane head. `part`: the tile has tokens of other sequences too, whose outputs are preserved."""
        width = self.plan.static.layout.value_width
        decode = self.plan.static.decode
        acc = self.state.acc[h]
        if decode:
            total = jnp.sum(self.state.total[h], axis=1, keepdims=True)
        else:
            acc, total = acc[:width], acc[width : width + 1]
        if self.plan.static.has_sinks:
            sink = jnp.exp2(self.sinks[h] - self.state.top[h])
            total = total + (sink[:, :1] if decode else sink[:1])
        result = acc / total
        if self.plan.static.scaled:
            result = result * self.plan.scalars.numbers[1]
        if part is not None:
            token = rem(jax.lax.broadcasted_iota(jnp.int32, result.shape, 1), self.plan.static.blocks.queries)
            token = token + self.plan.first_token(self.plan.tile)
            own = jnp.logical_and(token >= part.low, token < part.high)
            result = jnp.where(own, result, columns(self.out.at[h], 0, result.shape[1]).astype(jnp.float32))
        result = result.astype(self.out.dtype)
        if decode:
            self.out[index, h] = result
            return
        size = self.out.shape[3]
        for i in range(self.out.shape[1]):
            self.out[h, i] = result[:, i * size : (i + 1) * size]
        self.state.clear(h)


@dataclass(frozen=True)
class PassStream:
    """The order of arithmetic of the mixed variant over one sequence: a stream of (pass, lane head) pairs.

    The pairs of all blocks run pass by pass, software-pipelined with two stages of logits: the matrix unit computes the
    logits of the next pair while the vector unit computes the softmax of this one, across block boundaries. The loop
    body is an unrolled group of pairs, because little overlaps at the end of an iteration.
    """

    static: Static
    transfers: Transfers
    span: TileSpan
    q: Any  # [heads, parts, W, n]
    state: State
    stages: tuple[Stage, Stage]
    softcap: Any
    alibi: Callable[[Any, Mask], Alibi | None]
    mask: Callable[[Any], Mask]  # position of a pass's first token -> its mask
    first_slot: Any  # the buffer of its first block
    fetch_next: Callable[[Any, Any], None]  # (block, slot): start the fetch of the block after `block`

    @property
    def block_passes(self) -> int:
        """Return the passes per block."""
        return self.static.block_tokens // self.static.blocks.tokens

    @property
    def block_pairs(self) -> int:
        """Return the pairs per block."""
        return self.block_passes * self.static.layout.lane_heads

    @property
    def origin(self) -> Any:
        """Return the position of the first token of the first pass."""
        return self.span.page_low * self.static.layout.page_size

    @property
    def passes(self) -> Any:
        """Return the number of passes of the sequence."""
        return ceil_div(self.span.kv_end - self.origin, self.static.blocks.tokens)

    def run(self) -> None:
        """Process all pairs. The fetch of the first block has been started."""
        self.fetch_next(0, self.slot(1))
        self.wait_block(0)
        self.run_chains(self.logits((0, 0), 0, masked=True))
        heads = self.static.layout.lane_heads
        size = self.static.blocks.heads
        groups = ceil_div(self.passes * heads, size)
        position = (jnp.int32(0), jnp.int32(0))
        unmasked = jnp.int32(0)
        if not self.static.windowed:
            # Passes that end before the first query need no mask. A group's last logits belong to the next group.
            before = div(jnp.maximum(self.span.position + 1 - self.origin, 0), self.static.blocks.tokens)
            unmasked = jnp.minimum(div(before * heads, size), groups)
            if self.static.rules.chunk is not None:
                unmasked = jnp.where(self.in_one_chunk, unmasked, 0)
            position = jax.lax.fori_loop(0, unmasked, partial(self.group, False), position)
        jax.lax.fori_loop(unmasked, groups, partial(self.group, True), position)

    @property
    def in_one_chunk(self) -> Any:
        """Return whether the sequence's tokens of the tile all see the same first key, where the first pass begins."""
        chunk = self.static.rules.chunk
        assert chunk is not None, "tokens attend in chunks"
        if chunk % self.static.layout.page_size:
            return jnp.bool_(False)
        begin = div(self.span.position, chunk) * chunk
        return self.span.position + self.span.high - self.span.low <= begin + chunk

    def group(self, masked: bool, _: Any, position: PassPosition) -> PassPosition:
        """Process the group of pairs at `position`; return the position of the next one."""
        block, pair = position
        size = self.static.blocks.heads
        first_group = jnp.logical_and(block > 0, pair < size)
        last_group = pair + size >= self.block_pairs
        pl.when(first_group)(lambda: self.fetch_next(block, self.slot(block + 1)))
        pl.when(jnp.logical_and(last_group, block + 1 < self.span.blocks))(lambda: self.wait_block(block + 1))
        for part in range(size):
            logits = self.logits(position, part + 1, masked=masked or part + 1 == size)
            softmax = self.softmax(position, part)
            if self.static.alternates:
                self.run_chains(logits, softmax)
            else:
                self.run_chains(logits)
                self.run_chains(softmax)
        return jnp.where(last_group, block + 1, block), pair + size - jnp.where(last_group, self.block_pairs, 0)

    def run_chains(self, *halves: ColumnLogits | ColumnSoftmax) -> None:
        """Compute all chains of these halves in turn. The scheduler keeps to this order where it has the choice.

        Units of 256 columns finish a chain of logits while the vector unit is at one of the softmax; if all logits came
        first, more numbers would be alive than there are registers. Units of 128 are busy either way, and wait less
        for a half as a whole.
        """
        for first in column_chains(self.static.rows):
            for half in halves:
                half.run(first)

    def logits(self, position: PassPosition, part: int, *, masked: bool) -> ColumnLogits:
        """Return the first half of pair number `part` after `position`."""
        start, h, k, _ = self.load(position, part)
        mask = self.mask(start)
        alibi = self.alibi(h, mask)
        return ColumnLogits(self.q.at[h], k, self.stages[part % 2], self.softcap, alibi, mask if masked else None)

    def softmax(self, position: PassPosition, part: int) -> ColumnSoftmax:
        """Return the second half of pair number `part` after `position`."""
        _, h, _, v = self.load(position, part)
        return ColumnSoftmax.of(v, self.stages[part % 2], self.state, h)

    def load(self, position: PassPosition, part: int) -> tuple[Any, Any, jax.Array, jax.Array]:
        """Return a pass's position, lane head, K and V. Pairs after the last pass reload it and are masked."""
        block = position[0]
        pair = position[1] + part
        next_block = pair >= self.block_pairs
        block = jnp.where(next_block, block + 1, block)
        pair = jnp.where(next_block, pair - self.block_pairs, pair)
        index = div(pair, self.static.layout.lane_heads)
        h = pair - index * self.static.layout.lane_heads
        start = self.origin + (block * self.block_passes + index) * self.static.blocks.tokens
        last = self.span.blocks - 1
        over = block * self.block_passes + index >= self.passes
        block = jnp.where(over, last, block)
        index = jnp.where(over, self.passes - 1 - last * self.block_passes, index)
        kv = self.transfers.kv.at[self.slot(block)]
        k, v = self.static.load(kv, self.static.layout, self.static.blocks.tokens, index, h - part % 2, part % 2)
        return start, h, k, v

    def slot(self, block: Any) -> Any:
        """Return the buffer of a block."""
        return rem(self.first_slot + block, 2)

    def wait_block(self, block: Any) -> None:
        """Wait until a block has been fetched."""
        size = self.static.block_tokens
        tokens = jnp.minimum(self.span.kv_end - self.origin - block * size, size)
        self.transfers.wait_fetched(tokens, self.slot(block))
        self.transfers.clear_tail(tokens, self.slot(block))
