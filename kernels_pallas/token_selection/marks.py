"""Which tokens the queries of a step attend to: one bit per query and token, and what attention reads of them.

The queries of a tile share words: bit i of word c says whether query i of the tile attends to position c of its
sequence. A tile is `DECODE_TILE` decoded sequences, or `MIXED_TILE` consecutive tokens of any sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES
from pagoda.kernels_pallas.ragged_paged_attention.plan import TileSpan, div
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

DECODE_TILE: Final = 8
"""Decoded sequences whose bits share words."""
MIXED_TILE: Final = 32
"""Consecutive tokens whose bits share words."""
FETCH_TOKENS: Final = 2048
"""Cached tokens of a fetch, fewer if contexts are shorter."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelectedTokens:
    """The tokens that each query attends to, int32 [tiles, 1, C]; C is `padded_context`."""

    decode: jax.Array  # of the first tokens, as if all were of decoded sequences; undefined for all others
    mixed: jax.Array | None  # of all tokens; undefined for decoded ones. None if there are no others

    @classmethod
    def unselected(cls, tokens: int, seqs: int, max_pages: int, page_size: int, *, decode_only: bool) -> SelectedTokens:
        """Return the selection of a step in which nothing has been selected yet, in the shapes of `select_tokens`."""
        context = padded_context(max_pages, page_size)
        decode = jnp.zeros((-(-min(tokens, seqs) // DECODE_TILE), 1, context), jnp.int32)
        return cls(decode, None if decode_only else jnp.zeros((-(-tokens // MIXED_TILE), 1, context), jnp.int32))

    def of_tokens(self, count: int, decodes: jax.Array) -> jax.Array:
        """Return bool [count, C]: the positions of its sequence that each token attends to."""
        decoded = unpack_marks(self.decode, DECODE_TILE)[:count]
        if self.mixed is None:
            return decoded
        decoded = jnp.pad(decoded, ((0, count - len(decoded)), (0, 0)))
        return jnp.where(jnp.arange(count)[:, None] < decodes, decoded, unpack_marks(self.mixed, MIXED_TILE)[:count])


def pack_marks(marks: jax.Array, tile: int) -> jax.Array:
    """Pack bool [T, C] into int32 [tiles, 1, C]."""
    padded = jnp.pad(marks, ((0, -len(marks) % tile), (0, 0))).reshape(-1, tile, marks.shape[1])
    bits = jnp.where(padded, jnp.int32(1) << jnp.arange(tile, dtype=jnp.int32)[:, None], 0)
    return bits.sum(1, keepdims=True, dtype=jnp.int32)


def unpack_marks(words: jax.Array, tile: int) -> jax.Array:
    """Invert `pack_marks`: int32 [tiles, 1, C] -> bool [tiles * tile, C]."""
    bits = words >> jnp.arange(tile, dtype=jnp.int32)[:, None] & 1
    return (bits == 1).reshape(-1, words.shape[2])


def fetch_pages(max_pages: int, page_size: int) -> int:
    """Return the pages of a fetch: whole lanes of tokens."""
    unit = LANES // math.gcd(LANES, page_size)
    return unit * max(1, min(FETCH_TOKENS // (unit * page_size), -(-max_pages // unit)))


def padded_context(max_pages: int, page_size: int) -> int:
    """Return the tokens of the longest context, in whole fetches."""
    pages = fetch_pages(max_pages, page_size)
    return -(-max_pages // pages) * pages * page_size


@dataclass(frozen=True)
class MarkedTransfers(Transfers):
    """The transfers of a kernel that reads with each block of pages the bits of its tile."""

    words: Any  # int32 [tiles, 1, C] HBM
    marks: Any  # int32 [2, 1, tokens of a fetch] VMEM
    marked: Any  # DMA semaphores [2]

    def fetch(self, seq: Any, span: TileSpan, block: Any, slot: Any) -> None:
        """Start the copies of one block of pages, and of its bits."""
        super().fetch(seq, span, block, slot)
        size = self.plan.static.block_tokens
        tile = div(jnp.asarray(span.low, jnp.int32), DECODE_TILE if self.plan.static.decode else MIXED_TILE)
        source = self.words.at[tile, :, pl.ds(pl.multiple_of(block * size, LANES), size)]
        pltpu.make_async_copy(source, self.marks.at[slot], self.marked.at[slot]).start()

    def wait_fetched(self, tokens: Any, slot: Any) -> None:
        """Wait for a block of `tokens` tokens and its bits."""
        super().wait_fetched(tokens, slot)
        pltpu.make_async_copy(self.marks.at[slot], self.marks.at[slot], self.marked.at[slot]).wait()
