"""Writing latents to their pages, also where two tokens share a row of words (`LatentLayout.sections` 2).

`section_words` arranges a step's words by the section that a token falls into, and completes the shared ones with the
token half a page before or after. Of tokens before the step only the cache has them: `read_partners`. The attention
kernel writes one token of each decoded sequence itself; `write_latents` writes those of all other sequences, and
`store_latents` those of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES, PageLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch, div, rem


def store_latents(
    latents: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: LatentLayout,
    *,
    use_kernel: bool,
    interpret: Any,
) -> jax.Array:
    """Return the cache with the latents [T, channels] of all real tokens. `batch`: `cleaned`."""
    if not use_kernel:
        return write_reference(latents, cache, layer, batch, layout)
    words = layout.pack(latents)
    if layout.sections == 2:
        partners = read_partners(cache, layer, batch, len(words), layout, interpret=interpret)
        words = section_words(words, partners, batch, layout)
    else:
        words = words.swapaxes(0, 1)
    everything = replace(batch, counts=jnp.stack([jnp.int32(0), batch.counts[1]]))
    return write_latents(words, cache, layer, everything, layout, interpret=interpret)


def section_words(words: jax.Array, partners: jax.Array, batch: RaggedBatch, layout: LatentLayout) -> jax.Array:
    """Return words [R, T, 128] as stored: of the first section a token's own rows, then the shared one; else reversed.

    words [T, R, 128], as of `LatentLayout.pack`; partners [T, 128], as of `read_partners`.
    """
    count = len(words)
    half = layout.page_size // 2
    seq, position = batch.tokens(count)
    token = jnp.arange(count)
    second = position % layout.page_size >= half
    own = words[:, :-1]
    shared = words[:, -1]
    behind = jnp.pad(shared, ((half, 0), (0, 0)))[:count]
    ahead = jnp.pad(shared, ((0, half), (0, 0)))[half:]
    later = (token + half < batch.query_start[seq + 1])[:, None]
    earlier = (token - half >= batch.query_start[seq])[:, None]
    low = jnp.where(earlier, behind, partners & 0xFFFF) | shared << 16
    high = shared | jnp.where(later, ahead, 0) << 16
    first = jnp.concatenate([own, high[:, None]], 1)
    return jnp.where(second[:, None, None], jnp.concatenate([low[:, None], own], 1), first).swapaxes(0, 1)


def read_partners(
    cache: jax.Array, layer: jax.Array, batch: RaggedBatch, tokens: int, layout: LatentLayout, *, interpret: Any
) -> jax.Array:
    """Return [tokens, 128]: the shared words of tokens whose partner is of an earlier step, from the cache.

    They are among the first half page of a sequence's new tokens. The words of all other tokens are undefined.
    """
    half = layout.page_size // 2
    row = layout.rows_per_token - 1

    def body(layer: Any, starts: Any, lengths: Any, pages: Any, counts: Any, cache: Any, out: Any, done: Any) -> None:
        def sequence(seq: Any, total: Any) -> Any:
            begin = starts[seq]
            end = starts[seq + 1]
            position = lengths[seq] - (end - begin)
            page = div(position, layout.page_size)
            offset = position - page * layout.page_size
            first = jnp.maximum(offset, half)
            count = jnp.minimum(offset + jnp.minimum(end - begin, half), layout.page_size) - first

            def start() -> None:
                source = cache.at[layer[0], pages[seq * max_pages + page], row, pl.ds(first - half, count)]
                pltpu.make_async_copy(source, out.at[pl.ds(begin + first - offset, count)], done).start()

            pl.when(count > 0)(start)
            return total + jnp.maximum(count, 0)

        _wait_rows(jax.lax.fori_loop(0, counts[1], sequence, jnp.int32(0)), out, done)

    max_pages = batch.page_table.shape[1]
    result: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tokens, LANES), cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="latent_partners",
    )(*_scalars(layer, batch), cache)
    return result


def write_latents(
    words: jax.Array, cache: jax.Array, layer: jax.Array, batch: RaggedBatch, layout: PageLayout, *, interpret: Any
) -> jax.Array:
    """Return the cache with the words [R, T, 128] of all sequences that are not decoded.

    The words are those of `section_words` if the layout has two sections. Those of keys and values are written alike.
    """
    half = layout.page_size // layout.sections
    rows = layout.rows_per_token

    def body(
        layer: Any, starts: Any, lengths: Any, pages: Any, counts: Any, new: Any, _: Any, cache: Any, *semaphores: Any
    ) -> None:
        own, shared = semaphores

        def sequence(seq: Any, totals: tuple[Any, Any]) -> tuple[Any, Any]:
            begin = starts[seq]
            end = lengths[seq]
            position = end - (starts[seq + 1] - begin)

            def piece(index: Any, totals: tuple[Any, Any]) -> tuple[Any, Any]:
                page = div(index, layout.sections)
                section = rem(index, layout.sections)
                start = jnp.maximum(position, index * half)
                stop = jnp.minimum(end, (index + 1) * half)
                target = cache.at[layer[0], pages[seq * max_pages + page]]
                token = begin + start - position
                # Words that the next section completes are its own to write.
                low = jnp.where(section == 0, jnp.clip(end - half, start, stop), start)

                def copy(row: Any, to: Any, count: Any, at: Any, semaphore: Any) -> None:
                    source = new.at[row, pl.ds(token + at - start, count)]
                    inside = target.at[to, pl.ds(at - index * half, count)]
                    pltpu.make_async_copy(source, inside, semaphore).start()

                if layout.sections == 1:
                    copy(pl.ds(0, rows), pl.ds(0, rows), stop - start, start, own)
                    return totals[0] + stop - start, totals[1]
                if rows > 1:
                    copy(pl.ds(section, rows - 1), pl.ds(section * rows, rows - 1), stop - start, start, own)
                row = (1 - section) * (rows - 1)
                pl.when(low < stop)(lambda: copy(row, rows - 1, stop - low, low, shared))
                return totals[0] + stop - start, totals[1] + stop - low

            return jax.lax.fori_loop(div(position, half), div(end - 1, half) + 1, piece, totals)

        totals = jax.lax.fori_loop(counts[0], counts[1], sequence, (jnp.int32(0), jnp.int32(0)))
        if layout.sections == 1 or rows > 1:
            _wait_rows(totals[0], new.at[pl.ds(0, rows - layout.sections + 1)], own, axis=1)
        if layout.sections == 2:
            _wait_rows(totals[1], new.at[0], shared)

    max_pages = batch.page_table.shape[1]
    result: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        ),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="latent_write",
    )(*_scalars(layer, batch), words, cache)
    return result


def _scalars(layer: jax.Array, batch: RaggedBatch) -> tuple[jax.Array, ...]:
    return layer[None], batch.query_start, batch.kv_len, batch.page_table.reshape(-1), batch.counts


def _wait_rows(count: Any, ref: Any, semaphore: Any, axis: int = 0) -> None:
    """Wait for copies of `count` rows of `ref`: the semaphore counts bytes."""
    rows = ref.at[(slice(None),) * axis + (pl.ds(0, count),)]
    pl.when(count > 0)(lambda: pltpu.make_async_copy(rows, rows, semaphore).wait())


def write_reference(
    latents: jax.Array, cache: jax.Array, layer: jax.Array, batch: RaggedBatch, layout: LatentLayout
) -> jax.Array:
    """Return the cache with the latents [T, channels] of all real tokens, by plain jnp."""
    seq, position = batch.tokens(len(latents))
    real = jnp.arange(len(latents)) < batch.query_start[-1]
    page = jnp.where(real, batch.page_table[seq, position // layout.page_size], cache.shape[1])  # else: dropped
    offset = position % layout.page_size
    words = layout.pack(latents)
    rows = layout.rows_per_token
    if layout.sections == 1:
        return cache.at[layer, page[:, None], jnp.arange(rows), offset[:, None]].set(words, mode="drop")
    half = layout.page_size // 2
    partners = cache[layer, jnp.minimum(page, cache.shape[1] - 1), rows - 1, offset % half]
    stored = section_words(words, partners, batch, layout).swapaxes(0, 1)
    row = (offset // half * (rows - 1))[:, None] + jnp.arange(rows)
    return cache.at[layer, page[:, None], row, (offset % half)[:, None]].set(stored, mode="drop")
