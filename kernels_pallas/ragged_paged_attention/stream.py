"""The mixed variant's order of arithmetic over one sequence: a stream of (pass, lane head) pairs.

The pairs of all blocks of a sequence follow each other, pass by pass. Two stages hold logits: the matrix unit fills one
with those of the next pair while the vector unit takes the softmax of this pair from the other, whatever block either
lies in. A group of pairs is the body of the loop, unrolled, so that its end, where little overlaps, comes rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pagoda.kernels_pallas.ragged_paged_attention.attend import Mask, Stage, State, column_logits, column_softmax, load
from pagoda.kernels_pallas.ragged_paged_attention.plan import Static, TileSpan, ceil_div, div, rem
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

PassPosition = tuple[Any, Any]  # block, pair within it


@dataclass(frozen=True)
class PassStream:
    """One sequence's pairs in one tile."""

    static: Static
    moves: Transfers
    span: TileSpan
    q: Any  # [1, heads, 1, M, W]
    state: State
    stages: tuple[Stage, Stage]
    softcap: Any
    mask: Callable[[Any], Mask]  # of a pass, from the position of its first token
    first_slot: Any  # the buffer of its first block
    fetch_next: Callable[[Any, Any], None]  # (block, slot): starts the fetch of what follows a block

    @property
    def turns(self) -> int:
        """Passes of a whole block."""
        return self.static.block_tokens // self.static.blocks.tokens

    @property
    def block_pairs(self) -> int:
        """Pairs of a whole block."""
        return self.turns * self.static.layout.lane_heads

    @property
    def origin(self) -> Any:
        """Position of the first token of the first pass."""
        return self.span.page_low * self.static.layout.page_size

    @property
    def passes(self) -> Any:
        """Passes of the sequence."""
        return ceil_div(self.span.kv_end - self.origin, self.static.blocks.tokens)

    def run(self) -> None:
        """All pairs. The block in `first_slot` is on its way."""
        self.fetch_next(0, self.slot(1))
        self.arrive(0)
        self.logits((0, 0), 0, masked=True)
        heads, size = self.static.layout.lane_heads, self.static.blocks.heads
        groups, place = ceil_div(self.passes * heads, size), (jnp.int32(0), jnp.int32(0))
        clear = jnp.int32(0)
        if not self.static.windowed:
            # Passes that end before the first query need no mask; the last logits of a group are of the next group.
            before = div(jnp.maximum(self.span.position + 1 - self.origin, 0), self.static.blocks.tokens)
            clear = jnp.minimum(div(before * heads, size), groups)
            place = jax.lax.fori_loop(0, clear, partial(self.group, False), place)
        jax.lax.fori_loop(clear, groups, partial(self.group, True), place)

    def group(self, masked: bool, _: Any, place: PassPosition) -> PassPosition:
        """The group that begins at `place`; returns the next one's place."""
        (block, pair), size = place, self.static.blocks.heads
        enters = jnp.logical_and(block > 0, pair < size)
        leaves = pair + size >= self.block_pairs
        pl.when(enters)(lambda: self.fetch_next(block, self.slot(block + 1)))
        pl.when(jnp.logical_and(leaves, block + 1 < self.span.blocks))(lambda: self.arrive(block + 1))
        for part in range(size):
            self.logits(place, part + 1, masked=masked or part + 1 == size)
            self.softmax(place, part)
        return jnp.where(leaves, block + 1, block), pair + size - jnp.where(leaves, self.block_pairs, 0)

    def logits(self, place: PassPosition, part: int, *, masked: bool) -> None:
        """First half of pair number `part` from `place`."""
        start, h, k, _ = self.load(place, part)
        mask = self.mask(start) if masked else None
        column_logits(self.q.at[0, h, 0], k, self.stages[part % 2], self.softcap, mask)

    def softmax(self, place: PassPosition, part: int) -> None:
        """Second half of pair number `part` from `place`."""
        _, h, _, v = self.load(place, part)
        column_softmax(v, self.stages[part % 2], self.state, h)

    def load(self, place: PassPosition, part: int) -> tuple[Any, Any, jax.Array, jax.Array]:
        """The position of a pass, its head, K and V. Pairs after the last pass read it again; their mask hides it."""
        block, pair = place[0], place[1] + part
        later = pair >= self.block_pairs
        block, pair = jnp.where(later, block + 1, block), jnp.where(later, pair - self.block_pairs, pair)
        turn = div(pair, self.static.layout.lane_heads)
        h = pair - turn * self.static.layout.lane_heads
        start = self.origin + (block * self.turns + turn) * self.static.blocks.tokens
        last = self.span.blocks - 1
        over = block * self.turns + turn >= self.passes
        block, turn = jnp.where(over, last, block), jnp.where(over, self.passes - 1 - last * self.turns, turn)
        kv = self.moves.kv.at[self.slot(block)]
        k, v = load(kv, self.static.layout, self.static.blocks.tokens, turn, h - part % 2, part % 2)
        return start, h, k, v

    def slot(self, block: Any) -> Any:
        """The buffer of a block."""
        return rem(self.first_slot + block, 2)

    def arrive(self, block: Any) -> None:
        """Waits for a block."""
        size = self.static.block_tokens
        tokens = jnp.minimum(self.span.kv_end - self.origin - block * size, size)
        self.moves.wait_fetched(tokens, self.slot(block))
        self.moves.clear_tail(tokens, self.slot(block))
