"""The sequences of a step with recurrent state, and the visits of a kernel that works in tiles of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentBatch:
    """The sequences of a step with recurrent state; entries beyond `counts` are undefined."""

    query_start: jax.Array  # int32 [S + 1]: first token of each sequence
    blocks: jax.Array  # int32 [S]: the block of each sequence's state
    is_first: jax.Array  # bool [S]: the sequence has no tokens before, so its state is 0 whatever the block holds
    counts: jax.Array  # int32 [2]: sequences of one token (which come first), all sequences
    drops_states: bool = field(default=False, metadata={"static": True})
    """The states after the tokens are dropped: kernels write them to block 0, which nobody reads. No sequence then
    counts as one of one token."""

    @property
    def max_seqs(self) -> int:
        """Return S, which is static."""
        return self.blocks.shape[0]

    def target(self, block: Any) -> Any:
        """Return the block to which the state after the tokens is written, for the one in which it was before."""
        return 0 if self.drops_states else block

    @staticmethod
    def shapes(seqs: int, sharding: Any = None) -> Any:
        """Return the ShapeDtypeStructs of a batch of at most `seqs` sequences."""

        def shape(size: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct((size,), dtype, sharding=sharding)

        return RecurrentBatch(
            query_start=shape(seqs + 1), blocks=shape(seqs), is_first=shape(seqs, jnp.bool_), counts=shape(2)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileVisits:
    """One entry per pair of a tile and a sequence of the mixed part that overlap, in order; int32 [n], n static.

    A kernel that gets the visits as a scalar-prefetch argument has refs in SMEM by the same names.
    """

    tile: Any
    block: Any  # of the sequence's state
    low: Any  # first token of the sequence, relative to the tile
    high: Any  # end of its tokens, relative to the tile
    start: Any  # 1 at a sequence's first visit
    zero: Any  # 1 if the sequence's state is 0 before
    new_tile: Any  # 1 at a tile's first visit


def tile_visits(batch: RecurrentBatch, tokens: int, size: int) -> tuple[TileVisits, jax.Array]:
    """Return the visits of the sequences that are not decoded, and the number of real entries. `size`: of a tile."""
    sequence = jnp.arange(batch.max_seqs)
    begins = batch.query_start[:-1]
    ends = batch.query_start[1:]
    mixed = (sequence >= batch.counts[0]) & (sequence < batch.counts[1]) & (ends > begins)
    per_sequence = jnp.where(mixed, (ends - 1) // size - begins // size + 1, 0)
    visit_ends = jnp.cumsum(per_sequence)
    visit = jnp.arange(-(-tokens // size) + batch.max_seqs, dtype=jnp.int32)
    of = jnp.minimum((visit[:, None] >= visit_ends[None]).sum(1), batch.max_seqs - 1)
    index = visit - (visit_ends - per_sequence)[of]
    tile = jnp.clip(begins[of] // size + index, 0, -(-tokens // size) - 1)
    visits = TileVisits(
        tile=tile,
        block=batch.blocks[of],
        low=begins[of] - tile * size,
        high=ends[of] - tile * size,
        start=index == 0,
        zero=batch.is_first[of],
        new_tile=jnp.concatenate([jnp.ones(1, bool), tile[1:] != tile[:-1]]),
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), visits), visit_ends[-1].astype(jnp.int32)
