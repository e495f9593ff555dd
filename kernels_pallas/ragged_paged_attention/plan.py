"""What a kernel call fixes, what it is told in scalar memory, and what follows: which tokens a tile holds and needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pagoda.kernels_pallas.ragged_paged_attention.blocks import Blocks
from pagoda.kernels_pallas.ragged_paged_attention.layout import KvLayout
from pagoda.kernels_pallas.ragged_paged_attention.scalar import ceil_div, div


@dataclass(frozen=True)
class Static:
    """What one compilation fixes."""

    decode: bool
    layout: KvLayout
    blocks: Blocks
    rows: int  # M: rows of one matmul, queries x heads of a lane head, padded
    max_pages: int
    windowed: bool
    softcapped: bool
    sunk: bool
    scaled: bool

    @property
    def block_tokens(self) -> int:
        """Tokens of one fetch."""
        return self.blocks.pages * self.layout.page_size


@dataclass(frozen=True)
class Scalars:
    """Scalar-prefetch arguments, all in SMEM.

    step int32 [6]: layer, decode sequences, sequences, first tile, tiles, window. numbers float32 [2]: softcap in base
    2, v_scale. first_seq [tiles + 1]: first sequence of each mixed tile.
    """

    step: Any
    numbers: Any
    query_start: Any
    kv_len: Any
    pages: Any
    first_seq: Any


@dataclass(frozen=True)
class Span:
    """One sequence seen from one tile: its tokens [low, high) in the tile, their positions, the pages they need."""

    low: Any
    high: Any
    position: Any  # of token `low`
    kv_end: Any
    page_low: Any
    blocks: Any


@dataclass(frozen=True)
class Plan:
    """The order of work: tiles, their sequences, the part of a sequence that a tile holds."""

    static: Static
    scalars: Scalars

    def sequences(self, tile: Any) -> tuple[Any, Any]:
        """Sequences [first, end) of a tile."""
        s, n = self.scalars, self.static.blocks.queries
        if self.static.decode:
            return tile * n, jnp.minimum((tile + 1) * n, s.step[1])
        token = jnp.minimum((s.step[3] + tile + 1) * n, s.query_start[s.step[2]]) - 1
        last = s.first_seq[tile + 1]  # the next tile may begin with the sequence that ends this one
        shared = jnp.logical_and(last < s.step[2], s.query_start[jnp.minimum(last, s.step[2] - 1)] <= token)
        return s.first_seq[tile], jnp.where(shared, last + 1, last)

    def span(self, tile: Any, seq: Any) -> Span:
        """What of `seq` a tile holds and needs."""
        s, layout = self.scalars, self.static.layout
        kv_len = s.kv_len[seq]
        if self.static.decode:
            low, high, position, kv_end = seq, seq + 1, kv_len - 1, kv_len
        else:
            n = self.static.blocks.queries
            begin, end = s.query_start[seq], s.query_start[seq + 1]
            low = jnp.maximum(begin, (s.step[3] + tile) * n)
            high = jnp.minimum(end, (s.step[3] + tile + 1) * n)
            position, kv_end = kv_len - end + low, kv_len - end + high
        first = jnp.maximum(position - s.step[5] + 1, 0) if self.static.windowed else jnp.int32(0)
        page_low = div(first, layout.page_size)
        pages = ceil_div(kv_end, layout.page_size) - page_low
        return Span(low, high, position, kv_end, page_low, ceil_div(pages, self.static.blocks.pages))

    def page(self, seq: Any, index: Any) -> Any:
        """The page table's entry."""
        return self.scalars.pages[seq * self.static.max_pages + index]

    def first_token(self, tile: Any) -> Any:
        """The first token of a mixed tile."""
        return (self.scalars.step[3] + tile) * self.static.blocks.queries
