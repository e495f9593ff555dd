"""The order of arithmetic of the mixed variant over one sequence: a stream of (pass, lane head) pairs.

The pairs of all blocks of a sequence run pass by pass, software-pipelined with two stages of logits: the matrix unit
computes the logits of the next pair while the vector unit computes the softmax of this one, across block boundaries.
The loop body is an unrolled group of pairs, because little overlaps at the end of an iteration.
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

PassPosition = tuple[Any, Any]  # block, pair within the block


@dataclass(frozen=True)
class PassStream:
    """The pairs of one sequence in one tile."""

    static: Static
    transfers: Transfers
    span: TileSpan
    q: Any  # [1, heads, 1, M, W]
    state: State
    stages: tuple[Stage, Stage]
    softcap: Any
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
        self.logits((0, 0), 0, masked=True)
        heads, size = self.static.layout.lane_heads, self.static.blocks.heads
        groups, position = ceil_div(self.passes * heads, size), (jnp.int32(0), jnp.int32(0))
        unmasked = jnp.int32(0)
        if not self.static.windowed:
            # Passes that end before the first query need no mask. A group's last logits belong to the next group.
            before = div(jnp.maximum(self.span.position + 1 - self.origin, 0), self.static.blocks.tokens)
            unmasked = jnp.minimum(div(before * heads, size), groups)
            position = jax.lax.fori_loop(0, unmasked, partial(self.group, False), position)
        jax.lax.fori_loop(unmasked, groups, partial(self.group, True), position)

    def group(self, masked: bool, _: Any, position: PassPosition) -> PassPosition:
        """Process the group of pairs at `position`; return the position of the next one."""
        (block, pair), size = position, self.static.blocks.heads
        first_group = jnp.logical_and(block > 0, pair < size)
        last_group = pair + size >= self.block_pairs
        pl.when(first_group)(lambda: self.fetch_next(block, self.slot(block + 1)))
        pl.when(jnp.logical_and(last_group, block + 1 < self.span.blocks))(lambda: self.wait_block(block + 1))
        for part in range(size):
            self.logits(position, part + 1, masked=masked or part + 1 == size)
            self.softmax(position, part)
        return jnp.where(last_group, block + 1, block), pair + size - jnp.where(last_group, self.block_pairs, 0)

    def logits(self, position: PassPosition, part: int, *, masked: bool) -> None:
        """Run the first half of pair number `part` after `position`."""
        start, h, k, _ = self.load(position, part)
        mask = self.mask(start) if masked else None
        column_logits(self.q.at[0, h, 0], k, self.stages[part % 2], self.softcap, mask)

    def softmax(self, position: PassPosition, part: int) -> None:
        """Run the second half of pair number `part` after `position`."""
        _, h, _, v = self.load(position, part)
        column_softmax(v, self.stages[part % 2], self.state, h)

    def load(self, position: PassPosition, part: int) -> tuple[Any, Any, jax.Array, jax.Array]:
        """Return a pass's position, lane head, K and V. Pairs after the last pass reload it and are masked."""
        block, pair = position[0], position[1] + part
        next_block = pair >= self.block_pairs
        block, pair = jnp.where(next_block, block + 1, block), jnp.where(next_block, pair - self.block_pairs, pair)
        index = div(pair, self.static.layout.lane_heads)
        h = pair - index * self.static.layout.lane_heads
        start = self.origin + (block * self.block_passes + index) * self.static.blocks.tokens
        last = self.span.blocks - 1
        over = block * self.block_passes + index >= self.passes
        block, index = jnp.where(over, last, block), jnp.where(over, self.passes - 1 - last * self.block_passes, index)
        kv = self.transfers.kv.at[self.slot(block)]
        k, v = load(kv, self.static.layout, self.static.blocks.tokens, index, h - part % 2, part % 2)
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
