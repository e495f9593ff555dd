"""The Pallas kernel: the decode variant and the mixed variant of one body.

The grid runs over tiles of queries: a decode tile holds a few sequences of one token, a mixed tile some consecutive
tokens whatever their sequences. Inside a tile the kernel visits each sequence it holds, and for each the KV blocks
it can see:

    for tile:                       queries and outputs are moved by Pallas' own pipeline
        for sequence in tile:       a mixed tile masks the rows of its other sequences
            for block of pages:     fetched one step ahead, across sequences and tiles, into one of two buffers
                for heads, passes:  online softmax (flash attention, arXiv 2205.14135), base 2

New K and V go from HBM to their pages by DMA, one tile ahead of the reads. All heads of a group are rows of one matmul.
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
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.attend import (
    SUBLANES,
    Mask,
    State,
    attend_rows,
    column_logits,
    column_softmax,
    load,
)
from pagoda.kernels_pallas.ragged_paged_attention.plan import Plan, Span
from pagoda.kernels_pallas.ragged_paged_attention.scalar import ceil_div, div, rem

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Body:
    """The kernel body over its references; `run` is one grid step."""

    plan: Plan
    q: Any  # [1, heads, sub, M, W] VMEM
    sinks: Any  # as state.top, VMEM, or None
    new: Any  # [R, T, 128] HBM
    cache: Any  # [L, P, R, B, 128] HBM
    out: Any  # [1, heads, sub, M, W], mixed [1, heads, 1, W, M]
    kv: Any  # [2, pages of a fetch, R, B, 128] VMEM
    state: State
    stages: Any  # two `Stage`s, None in the decode variant
    slot: Any  # [1] SMEM: the buffer that holds the next block
    fetched: Any  # DMA semaphores [2]
    written: Any  # DMA semaphore

    # -- transfers ---------------------------------------------------------------------------------------------------

    def write(self, tile: Any) -> None:
        """Starts the copies of a tile's new K and V to their pages."""
        layer, size = self.plan.scalars.step[0], self.plan.static.layout.page_size

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)

            def piece(i: Any, _: Any) -> None:
                page = div(span.position, size) + i
                start = jnp.maximum(span.position, page * size)
                stop = jnp.minimum(span.kv_end, (page + 1) * size)
                token = span.low + start - span.position
                count = stop - start
                target = self.cache.at[layer, self.plan.page(seq, page), :, pl.ds(start - page * size, count)]
                pltpu.make_async_copy(self.new.at[:, pl.ds(token, count)], target, self.written).start()

            pieces = 1 if self.plan.static.decode else div(span.kv_end - 1, size) - div(span.position, size) + 1
            jax.lax.fori_loop(0, pieces, piece, None)

        first, end = self.plan.sequences(tile)
        jax.lax.fori_loop(first, end, sequence, None)

    def wait_written(self, tile: Any) -> None:
        """Waits for all copies of `write(tile)` at once: a semaphore counts bytes."""
        first, end = self.plan.sequences(tile)
        tokens = (
            end - first
            if self.plan.static.decode
            else self.plan.span(tile, end - 1).high - self.plan.span(tile, first).low
        )
        rows = self.new.at[:, pl.ds(0, tokens)]
        pltpu.make_async_copy(rows, rows, self.written).wait()

    def fetch(self, seq: Any, span: Span, block: Any, slot: Any) -> None:
        """Starts the copies of one block of pages, of the last page only the tokens that exist."""
        size, layer = self.plan.static.layout.page_size, self.plan.scalars.step[0]
        start = span.page_low + block * self.plan.static.blocks.pages
        tokens = jnp.minimum(span.kv_end - start * size, self.plan.static.block_tokens)

        def page(i: Any, _: Any) -> None:
            real = pl.ds(0, jnp.minimum(tokens - i * size, size))
            source = self.cache.at[layer, self.plan.page(seq, start + i), :, real]
            pltpu.make_async_copy(source, self.kv.at[slot, i, :, real], self.fetched.at[slot]).start()

        jax.lax.fori_loop(0, ceil_div(tokens, size), page, None)

    def fetch_next(self, tile: Any, seq: Any, span: Span, block: Any, slot: Any) -> None:
        """Starts the fetch of whatever block comes after this one, in this sequence, this tile or the next."""
        _, end = self.plan.sequences(tile)
        tiles = self.plan.scalars.step[4]

        def next_tile() -> None:
            self.wait_written(tile + 1)
            first, _ = self.plan.sequences(tile + 1)
            self.fetch(first, self.plan.span(tile + 1, first), 0, slot)

        last = block + 1 == span.blocks
        ends = jnp.logical_and(last, seq + 1 == end)
        pl.when(jnp.logical_not(last))(lambda: self.fetch(seq, span, block + 1, slot))
        pl.when(jnp.logical_and(last, seq + 1 < end))(
            lambda: self.fetch(seq + 1, self.plan.span(tile, seq + 1), 0, slot)
        )
        pl.when(jnp.logical_and(ends, tile + 1 < tiles))(next_tile)

    def wait_fetched(self, tokens: Any, slot: Any) -> None:
        """Waits for a block of `tokens` tokens: its whole pages, then the last part."""
        size = self.plan.static.layout.page_size
        whole = div(tokens, size)
        rest = tokens - whole * size

        def wait(rows: Any) -> None:
            pltpu.make_async_copy(rows, rows, self.fetched.at[slot]).wait()

        pl.when(whole > 0)(lambda: wait(self.kv.at[slot, pl.ds(0, whole)]))
        pl.when(rest > 0)(lambda: wait(self.kv.at[slot, 0, :, pl.ds(0, rest)]))

    def clear_tail(self, tokens: Any, slot: Any) -> None:
        """Zeroes the buffer from the last real token to the end of its pass: 0 * NaN would be NaN."""
        size, unit = self.plan.static.layout.page_size, self.plan.static.blocks.tokens

        def clear(i: Any, _: Any) -> None:
            page = div(i * SUBLANES, size)
            here = pl.ds(pl.multiple_of(i * SUBLANES - page * size, SUBLANES), SUBLANES)
            rows = self.kv[slot, page, :, here, :]
            token = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) + i * SUBLANES
            self.kv[slot, page, :, here, :] = jnp.where(token < tokens, rows, jnp.zeros_like(rows))

        jax.lax.fori_loop(div(tokens, SUBLANES), ceil_div(tokens, unit) * (unit // SUBLANES), clear, None)

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def attend(self, index: Any, slot: Any, turn: Any, mask: Mask) -> None:
        """Decode: pass number `turn` of the buffer, for every lane head."""
        static, unrolled = self.plan.static, self.plan.static.blocks.heads

        def some(group: Any, _: Any) -> None:
            for part in range(unrolled):
                h = group * unrolled + part
                k, v = load(self.kv.at[slot], static.layout, static.blocks.tokens, turn, group * unrolled, part)
                attend_rows(self.q.at[0, h, index], k, v, self.state, h, self.softcap(), mask)

        groups = static.layout.lane_heads // unrolled
        if groups == 1:
            some(0, None)
        else:
            jax.lax.fori_loop(0, groups, some, None)

    def attend_passes(self, span: Span, slot: Any, start: Any, low: Any, high: Any, *, masked: bool) -> None:
        """Mixed: passes [low, high) of the buffer, whose first token is at `start`, for every lane head.

        The (pass, head) pairs form one sequence; the logits of the next are computed beside the softmax of this one.
        """
        heads, unit = self.plan.static.layout.lane_heads, self.plan.static.blocks.tokens
        count = (high - low) * heads

        def item(i: Any, stage: int) -> tuple[Any, Any, jax.Array, jax.Array]:
            turn = low + div(i, heads)
            h = i - (turn - low) * heads
            k, v = load(self.kv.at[slot], self.plan.static.layout, unit, turn, h - stage, stage)
            return turn, h, k, v

        def logits(i: Any, stage: int) -> None:
            turn, h, k, _ = item(jnp.minimum(i, count - 1), stage)
            mask = self.mask(span, start + turn * unit) if masked else None
            column_logits(self.q.at[0, h, 0], k, self.stages[stage], self.softcap(), mask)

        def softmax(i: Any, stage: int) -> None:
            _, h, _, v = item(i, stage)
            column_softmax(v, self.stages[stage], self.state, h)

        def pair(j: Any, _: Any) -> None:
            logits(2 * j + 1, 1)
            softmax(2 * j, 0)
            logits(2 * j + 2, 0)
            softmax(2 * j + 1, 1)

        @pl.when(count > 0)
        def _() -> None:
            logits(0, 0)
            jax.lax.fori_loop(0, div(count, 2), pair, None)
            if heads % 2:
                pl.when(rem(count, 2) == 1)(lambda: softmax(count - 1, 0))

    def softcap(self) -> Any:
        """The cap in base 2, or None."""
        return self.plan.scalars.numbers[0] if self.plan.static.softcapped else None

    def mask(self, span: Span, start: Any) -> Mask:
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

    def store(self, span: Span, index: Any) -> None:
        """Normalises and keeps what belongs to this sequence."""
        width = self.plan.static.layout.width

        def head(h: Any, _: Any) -> None:
            acc = self.state.acc[h]
            if self.plan.static.decode:
                total = jnp.sum(self.state.total[h], axis=1, keepdims=True)
            else:
                acc, total = acc[:width], acc[width : width + 1]
            if self.plan.static.sunk:
                sink = jnp.exp2(self.sinks[h] - self.state.top[h])
                total = total + (sink[:, :1] if self.plan.static.decode else sink[:1])
            result = acc / total
            if self.plan.static.scaled:
                result = result * self.plan.scalars.numbers[1]
            if not self.plan.static.decode:
                token = rem(jax.lax.broadcasted_iota(jnp.int32, result.shape, 1), self.plan.static.blocks.queries)
                token = token + self.plan.first_token(pl.program_id(0))
                mine = jnp.logical_and(token >= span.low, token < span.high)
                result = jnp.where(mine, result, self.out[0, h, index].astype(jnp.float32))
            self.out[0, h, index] = result.astype(self.out.dtype)

        jax.lax.fori_loop(0, self.plan.static.layout.lane_heads, head, None)

    # -- one grid step -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One tile."""
        tile = pl.program_id(0)

        def begin() -> None:
            self.slot[0] = 0
            self.write(0)
            self.wait_written(0)
            first, _ = self.plan.sequences(0)
            self.fetch(first, self.plan.span(0, first), 0, 0)

        pl.when(tile == 0)(begin)
        pl.when(tile + 1 < self.plan.scalars.step[4])(lambda: self.write(tile + 1))
        self.out[...] = jnp.zeros_like(self.out)
        first, end = self.plan.sequences(tile)

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)
            index = seq - first if self.plan.static.decode else 0
            self.state.clear()
            jax.lax.fori_loop(0, span.blocks, partial(self.block, tile, seq, span, index), None)
            self.store(span, index)

        jax.lax.fori_loop(first, end, sequence, None)

    def block(self, tile: Any, seq: Any, span: Span, index: Any, block: Any, _: Any) -> None:
        """One block of pages: start the next fetch, wait for this one, attend."""
        slot = self.slot[0]
        self.fetch_next(tile, seq, span, block, 1 - slot)
        start = (span.page_low + block * self.plan.static.blocks.pages) * self.plan.static.layout.page_size
        tokens = jnp.minimum(span.kv_end - start, self.plan.static.block_tokens)
        self.wait_fetched(tokens, slot)
        self.clear_tail(tokens, slot)
        unit = self.plan.static.blocks.tokens
        passes = ceil_div(tokens, unit)
        if self.plan.static.decode:
            one = lambda i, _: self.attend(index, slot, i, self.mask(span, start + i * unit))  # noqa: E731
            jax.lax.fori_loop(0, passes, one, None)
        else:
            # Passes that end before the first query need no mask, unless a window hides their beginning.
            clear = div(jnp.maximum(span.position + 1 - start, 0), unit)
            clear = jnp.int32(0) if self.plan.static.windowed else jnp.minimum(clear, passes)
            if not self.plan.static.windowed:
                self.attend_passes(span, slot, start, 0, clear, masked=False)
            self.attend_passes(span, slot, start, clear, passes, masked=True)
        self.slot[0] = 1 - slot
