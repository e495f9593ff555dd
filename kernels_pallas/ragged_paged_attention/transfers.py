"""The kernel's DMAs: new K and V to their pages, and pages to VMEM, each started ahead of its use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.attend import SUBLANES
from pagoda.kernels_pallas.ragged_paged_attention.plan import KernelPlan, TileSpan, ceil_div, div, rem


@dataclass(frozen=True)
class Transfers:
    """DMAs and the buffers they fill."""

    plan: KernelPlan
    new: Any  # [R, T, 128] HBM
    cache: Any  # [L, P, R, B, 128] HBM
    kv: Any  # [2, pages of a fetch, R of one core, B, 128] VMEM
    fetched: Any  # DMA semaphores [2]
    written: Any  # DMA semaphore

    def write(self, tile: Any) -> None:
        """Start the copies of a tile's new K and V to their pages, if the call has any."""
        if not self.plan.static.writes:
            return
        size = self.plan.static.layout.page_size

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)

            def piece(i: Any, _: Any) -> None:
                page = div(span.position, size) + i
                start = jnp.maximum(span.position, page * size)
                stop = jnp.minimum(span.kv_end, (page + 1) * size)
                token = span.low + start - span.position
                count = stop - start
                target = self.target(seq, page, start - page * size, count)
                pltpu.make_async_copy(
                    self.new.at[self.plan.core_rows, pl.ds(token, count)], target, self.written
                ).start()

            pieces = 1 if self.plan.static.decode else div(span.kv_end - 1, size) - div(span.position, size) + 1
            jax.lax.fori_loop(0, pieces, piece, None)

        first, end = self.plan.sequences(tile)
        jax.lax.fori_loop(first, end, sequence, None)

    def target(self, seq: Any, page: Any, first: Any, count: Any) -> Any:
        """Return the words of `count` tokens of a page, from `first`; of a page with two sections for decode only."""
        layer = self.plan.scalars.layer
        layout = self.plan.static.layout
        whole = self.cache.at[layer, self.plan.page(seq, page)]
        if layout.sections == 1:
            return whole.at[self.plan.core_rows, pl.ds(first, count)]
        size = layout.page_size // 2
        section = div(first, size)
        rows = layout.rows_per_token
        return whole.at[pl.ds(section * (rows - 1), rows), pl.ds(first - section * size, count)]

    def wait_written(self, tile: Any) -> None:
        """Wait for all copies of `write(tile)` at once: the semaphore counts bytes."""
        if not self.plan.static.writes:
            return
        first, end = self.plan.sequences(tile)
        tokens = (
            end - first
            if self.plan.static.decode
            else self.plan.span(tile, end - 1).high - self.plan.span(tile, first).low
        )
        rows = self.new.at[self.plan.core_rows, pl.ds(0, tokens)]
        pltpu.make_async_copy(rows, rows, self.written).wait()

    def fetch(self, seq: Any, span: TileSpan, block: Any, slot: Any) -> None:
        """Start the copies of one block of pages; of the last page only the real tokens."""
        size = self.plan.static.layout.page_size
        layer = self.plan.scalars.layer
        start = span.page_low + block * self.plan.static.blocks.pages
        tokens = jnp.minimum(span.kv_end - start * size, self.plan.static.block_tokens)

        def page(i: Any, _: Any) -> None:
            real = jnp.minimum(tokens - i * size, size)
            number = self.plan.page(seq, start + i)
            source = self.cache.at[layer, number, self.plan.core_rows]
            target = self.kv.at[slot, i]

            def copy(rows: Any) -> None:
                pltpu.make_async_copy(source.at[*rows], target.at[*rows], self.fetched.at[slot]).start()

            self.for_parts(real, copy)

        jax.lax.fori_loop(0, ceil_div(tokens, size), page, None)

    def fetch_next(self, tile: Any, seq: Any, span: TileSpan, block: Any, slot: Any) -> None:
        """Start the fetch of the block after this one: of this sequence, the next one, or the next tile."""
        _, end = self.plan.sequences(tile)
        tiles = self.plan.scalars.tiles

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
        """Wait for a block of `tokens` tokens: its full pages, then the last partial page."""
        size = self.plan.static.layout.page_size
        full_pages = div(tokens, size)
        remainder = tokens - full_pages * size

        def wait(rows: Any) -> None:
            pltpu.make_async_copy(rows, rows, self.fetched.at[slot]).wait()

        pl.when(full_pages > 0)(lambda: wait(self.kv.at[slot, pl.ds(0, full_pages)]))
        pl.when(remainder > 0)(lambda: self.for_parts(remainder, lambda rows: wait(self.kv.at[slot, 0, *rows])))

    def for_parts(self, tokens: Any, copy: Callable[[tuple[Any, Any]], None]) -> None:
        """Call `copy` with the rows and tokens of each part of the first `tokens` tokens of a page, at least one."""
        layout = self.plan.static.layout
        if layout.sections == 1:
            copy((slice(None), pl.ds(0, tokens)))
            return
        half = layout.page_size // 2
        rows = layout.rows_per_token
        copy((pl.ds(0, rows), pl.ds(0, jnp.minimum(tokens, half))))
        if rows > 1:
            pl.when(tokens > half)(lambda: copy((pl.ds(rows, rows - 1), pl.ds(0, tokens - half))))

    def clear_tail(self, tokens: Any, slot: Any) -> None:
        """Zero V in the buffer from the last real token to the end of its pass: 0 * NaN would be NaN.

        Logits of masked keys may be NaN, so that a row which two sections share, of K alone, is left as it is.
        """
        layout = self.plan.static.layout
        unit = self.plan.static.blocks.tokens
        size = layout.page_size // layout.sections
        own = layout.rows_per_token - layout.sections + 1

        def clear(i: Any, _: Any) -> None:
            section = div(i * SUBLANES, size)
            tokens_slice = pl.ds(pl.multiple_of(i * SUBLANES - section * size, SUBLANES), SUBLANES)
            page = div(section, layout.sections)
            first = rem(section, layout.sections) * (own + 1)
            rows = self.kv[slot, page, pl.ds(first, own), tokens_slice, :]
            token = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) + i * SUBLANES
            self.kv[slot, page, pl.ds(first, own), tokens_slice, :] = jnp.where(
                token < tokens, rows, jnp.zeros_like(rows)
            )

        jax.lax.fori_loop(div(tokens, SUBLANES), ceil_div(tokens, unit) * (unit // SUBLANES), clear, None)
