"""The Pallas kernel: the decode variant and the mixed variant of one body.

The grid runs over tiles of queries: a decode tile holds a few sequences of one token, a mixed tile some consecutive
tokens whatever their sequences. Inside a tile the kernel visits each sequence it holds, and for each the KV blocks
it can see:

    for tile:                       queries and outputs are moved by Pallas' own pipeline
        for sequence in tile:       a mixed tile masks the rows of its other sequences
            for block of pages:     fetched one step ahead, across sequences and tiles, into one of two buffers
                for heads, passes:  online softmax (flash attention, arXiv 2205.14135), base 2

`transfers` moves, `attend` computes one pass, `stream` orders the passes of the mixed variant.

New K and V go from HBM to their pages by DMA, one tile ahead of the reads. All heads of a group are rows of one matmul.
The kernel runs on one TensorCore: where a device has two (v5p), the other one is idle meanwhile, because the fetches
and writes that run ahead from tile to tile order the tiles.
The idea of a decode and a mixed specialisation in one ragged call is that of Ragged Paged Attention (arXiv 2604.15464);
the layout, the schedule and the code are our own. No `ref.reshape` and no `ref.bitcast`: the body must run in
`pltpu.InterpretParams`, which knows neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pagoda.kernels_pallas.ragged_paged_attention.attend import Mask, State, attend_rows, load
from pagoda.kernels_pallas.ragged_paged_attention.plan import KernelPlan, TileSpan, ceil_div, rem
from pagoda.kernels_pallas.ragged_paged_attention.stream import PassStream
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionKernelBody:
    """The kernel body over its references; `run` is one grid step."""

    plan: KernelPlan
    q: Any  # [1, heads, sub, M, W] VMEM
    sinks: Any  # as state.top, VMEM, or None
    out: Any  # [1, heads, sub, M, W], mixed [1, heads, 1, W, M]
    moves: Transfers
    state: State
    stages: Any  # two `Stage`s, None in the decode variant
    slot: Any  # [1] SMEM: the buffer that holds the next block

    def attend(self, index: Any, slot: Any, turn: Any, mask: Mask) -> None:
        """Decode: pass number `turn` of the buffer, for every lane head."""
        static, unrolled = self.plan.static, self.plan.static.blocks.heads

        def some(group: Any, _: Any) -> None:
            for part in range(unrolled):
                h = group * unrolled + part
                k, v = load(self.moves.kv.at[slot], static.layout, static.blocks.tokens, turn, group * unrolled, part)
                attend_rows(self.q.at[0, h, index], k, v, self.state, h, self.softcap(), mask)

        groups = static.layout.lane_heads // unrolled
        if groups == 1:
            some(0, None)
        else:
            jax.lax.fori_loop(0, groups, some, None)

    def attend_mixed(self, tile: Any, seq: Any, span: TileSpan) -> None:
        """Mixed: all blocks of a sequence."""
        slot = self.slot[0]
        stream = PassStream(
            static=self.plan.static,
            moves=self.moves,
            span=span,
            q=self.q,
            state=self.state,
            stages=self.stages,
            softcap=self.softcap(),
            mask=partial(self.mask, span),
            first_slot=slot,
            fetch_next=partial(self.moves.fetch_next, tile, seq, span),
        )
        stream.run()
        self.slot[0] = stream.slot(span.blocks)

    def softcap(self) -> Any:
        """The cap in base 2, or None."""
        return self.plan.scalars.numbers[0] if self.plan.static.softcapped else None

    def mask(self, span: TileSpan, start: Any) -> Mask:
        """The mask of a pass from `start`; the first query of a mixed tile may be another sequence's."""
        window = self.plan.scalars.step[5] if self.plan.static.windowed else None
        if self.plan.static.decode:
            return Mask(start, span.position, 1, window)
        return Mask(
            start,
            span.position + self.plan.first_token(pl.program_id(0)) - span.low,
            self.plan.static.blocks.queries,
            window,
        )

    def store(self, span: TileSpan, index: Any) -> None:
        """Normalises and keeps what belongs to this sequence; the mixed variant leaves an empty state."""
        heads = self.plan.static.layout.lane_heads
        if self.plan.static.decode:
            jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index), None)
            return
        whole = self.fills(span)
        pl.when(whole)(lambda: jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index), None))
        pl.when(jnp.logical_not(whole))(
            lambda: jax.lax.fori_loop(0, heads, lambda h, _: self.store_head(h, index, span), None)
        )

    def fills(self, span: TileSpan) -> Any:
        """Whether a sequence's tokens are all that a mixed tile has room for."""
        return span.high - span.low == self.plan.static.blocks.queries

    def store_head(self, h: Any, index: Any, part: TileSpan | None = None) -> None:
        """One lane head of `store`; `part` where a mixed tile holds other tokens, which are kept."""
        width, decode = self.plan.static.layout.width, self.plan.static.decode
        acc = self.state.acc[h]
        if decode:
            total = jnp.sum(self.state.total[h], axis=1, keepdims=True)
        else:
            acc, total = acc[:width], acc[width : width + 1]
        if self.plan.static.sunk:
            sink = jnp.exp2(self.sinks[h] - self.state.top[h])
            total = total + (sink[:, :1] if decode else sink[:1])
        result = acc / total
        if self.plan.static.scaled:
            result = result * self.plan.scalars.numbers[1]
        if part is not None:
            token = rem(jax.lax.broadcasted_iota(jnp.int32, result.shape, 1), self.plan.static.blocks.queries)
            token = token + self.plan.first_token(pl.program_id(0))
            mine = jnp.logical_and(token >= part.low, token < part.high)
            result = jnp.where(mine, result, self.out[0, h, index].astype(jnp.float32))
        self.out[0, h, index] = result.astype(self.out.dtype)
        if not decode:
            self.state.clear(h)

    # -- one grid step -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One tile."""
        tile = pl.program_id(0)

        def begin() -> None:
            self.slot[0] = 0
            self.moves.write(0)
            self.moves.wait_written(0)
            first, _ = self.plan.sequences(0)
            self.moves.fetch(first, self.plan.span(0, first), 0, 0)
            if not self.plan.static.decode:
                self.state.clear()

        pl.when(tile == 0)(begin)
        pl.when(tile + 1 < self.plan.scalars.step[4])(lambda: self.moves.write(tile + 1))
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
        """Tokens of no sequence give zero."""
        self.out[...] = jnp.zeros_like(self.out)

    def block(self, tile: Any, seq: Any, span: TileSpan, index: Any, block: Any, _: Any) -> None:
        """Decode: one block of pages: start the next fetch, wait for this one, attend."""
        slot = self.slot[0]
        self.moves.fetch_next(tile, seq, span, block, 1 - slot)
        start = (span.page_low + block * self.plan.static.blocks.pages) * self.plan.static.layout.page_size
        tokens = jnp.minimum(span.kv_end - start, self.plan.static.block_tokens)
        self.moves.wait_fetched(tokens, slot)
        self.moves.clear_tail(tokens, slot)
        unit = self.plan.static.blocks.tokens
        one = lambda i, _: self.attend(index, slot, i, self.mask(span, start + i * unit))  # noqa: E731
        jax.lax.fori_loop(0, ceil_div(tokens, unit), one, None)
        self.slot[0] = 1 - slot
