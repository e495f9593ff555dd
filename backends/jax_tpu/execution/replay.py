"""Recurrent state and drafts: a rejected draft cannot be taken back from a state, so no state includes drafts.

A sequence's block holds the state after the newest token of the row's last step, and what the rule reads of that
step's drafts. The next step applies the rule twice: first to the accepted ones of these drafts, of which there are
`lag`, and to the tokens that are no drafts, after which the state is kept; then to its own drafts, whose states are
dropped. Both times the tokens of all sequences are gathered into an array of static size. How many drafts were accepted
may be known on the device only, so all ranges are computed there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.tiles import read_tiles, write_tiles
from pagoda.kernels_pallas.recurrent_state import Arrays, RecurrentBatch

States: TypeAlias = tuple[jax.Array, ...]
"""The stacks of arrays in which a mixer keeps recurrent state."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens of sequences, to which a rule is applied from the states in their blocks."""

    batch: RecurrentBatch
    layer: jax.Array  # int32: which of the stacks' layers
    seq_ids: jax.Array  # int32 [T]: sequence of each token
    options: dict[str, Any]  # static arguments of the rule's kernels


class RecurrentRule(Protocol):
    """Return what follows from the tokens [T, ...], and the states after them. inputs: float32 [T, K, n] each."""

    def __call__(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]: ...


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """The tokens of all sequences one after the other, gathered from another array."""

    query_start: jax.Array  # int32 [S + 1]: first token of each sequence
    seq_ids: jax.Array  # int32 [n]: sequence of each token; padding tokens map to the last
    offsets: jax.Array  # int32 [n]: number of each token in its sequence

    @classmethod
    def of(cls, lengths: jax.Array, size: int) -> TokenRanges:
        """Return the ranges of sequences in an array of `size` tokens. lengths int32 [S]: their numbers of tokens."""
        ends = jnp.cumsum(lengths)
        query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), ends]).astype(jnp.int32)
        token = jnp.arange(size, dtype=jnp.int32)
        seq_ids = jnp.minimum((token[:, None] >= ends[None]).sum(1), len(lengths) - 1)
        return cls(query_start, seq_ids, token - query_start[seq_ids])


@dataclass(frozen=True, slots=True)
class DraftRanges:
    """The drafts of a step."""

    ranges: TokenRanges
    sources: jax.Array  # int32 [n]: the draft among the step's tokens
    kept: jax.Array  # int32 [S, most]: the drafts of each sequence among the step's tokens, then other tokens
    counts: jax.Array  # int32 [S]


@dataclass(frozen=True, slots=True)
class JaxReplay:
    """Which tokens a step runs again before its own, and which of its own are drafts."""

    most: int  # drafts of a sequence, at most
    ranges: TokenRanges  # of accepted drafts of the step before and of tokens that are no drafts
    sources: jax.Array  # int32 [n]: the token among the kept inputs of all sequences [S * most], then the step's tokens
    counts: jax.Array  # int32 [2]: sequences of one token in `ranges` before the first with another number; all
    outputs: jax.Array  # int32 [T]: each of the step's tokens in `ranges`, then those of `drafts`
    drafts: DraftRanges | None  # None: the step has none

    @classmethod
    def of(
        cls,
        *,
        lag: jax.Array,
        num_drafts: jax.Array | None,
        query_start: jax.Array,
        num_seqs: jax.Array,
        seq_ids: jax.Array,
        most: int,
    ) -> JaxReplay:
        """Return the replay of a step.

        lag int32 [S]: accepted drafts of the step before. num_drafts int32 [S], None: no sequence has drafts.
        query_start int32 [S + 1]; num_seqs int32: how many of S are sequences; seq_ids int32 [T].
        """
        seqs = len(lag)
        tokens = len(seq_ids)
        plain = jnp.diff(query_start) - (0 if num_drafts is None else num_drafts)
        size = tokens + seqs * most
        ranges = TokenRanges.of(lag + plain, size)
        own = query_start[ranges.seq_ids] + ranges.offsets - lag[ranges.seq_ids]
        is_kept = ranges.offsets < lag[ranges.seq_ids]
        sources = jnp.where(is_kept, ranges.seq_ids * most + ranges.offsets, seqs * most + jnp.clip(own, 0, tokens - 1))
        single = (lag + plain == 1) & (jnp.arange(seqs) < num_seqs)
        counts = jnp.stack([jnp.cumprod(single.astype(jnp.int32)).sum(), num_seqs]).astype(jnp.int32)
        offset = jnp.arange(tokens) - query_start[seq_ids]
        outputs = (ranges.query_start[:-1] + lag)[seq_ids] + offset
        drafts = None
        if num_drafts is not None:
            drafts = _drafts(num_drafts, query_start, tokens, most)
            of_draft = size + drafts.ranges.query_start[seq_ids] + offset - plain[seq_ids]
            outputs = jnp.where(offset < plain[seq_ids], outputs, of_draft)
        limit = size if drafts is None else size + len(drafts.sources)
        return cls(most, ranges, sources, counts, jnp.clip(outputs, 0, limit - 1), drafts)

    def apply(self, rule: RecurrentRule, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Apply the rule to the tokens of a step -> what follows from each of them [T, ...], and the states.

        inputs: float32 [T, K, n] each. states: those of the rule, then the stack of tiles that have the inputs
        of drafts [most, K, sum of n] of each block.
        """
        *own_states, stack = states
        ends = np.cumsum([x.shape[2] for x in inputs])[:-1]
        tokens = jnp.concatenate(inputs, axis=2)
        blocks = run.batch.blocks
        slots, width = tokens.shape[1:]
        kept = read_tiles(stack, run.layer, blocks, (self.most, slots, width)).reshape(-1, slots, width)
        gathered = jnp.concatenate([kept, tokens])[self.sources]
        options = {**run.options, "decode_only": False}
        first = replace(
            run,
            batch=replace(run.batch, query_start=self.ranges.query_start, counts=self.counts),
            seq_ids=self.ranges.seq_ids,
            options=options,
        )
        outputs, after = rule(tuple(jnp.split(gathered, ends, axis=2)), tuple(own_states), first)
        drafts = self.drafts
        if drafts is None:
            return outputs[self.outputs], (*after, stack)
        batch = replace(
            run.batch,
            query_start=drafts.ranges.query_start,
            is_first=jnp.zeros_like(run.batch.is_first),
            counts=jnp.stack([jnp.zeros_like(self.counts[1]), self.counts[1]]),
            drops_states=True,
        )
        second = replace(run, batch=batch, seq_ids=drafts.ranges.seq_ids, options=options)
        guessed, after = rule(tuple(jnp.split(tokens[drafts.sources], ends, axis=2)), after, second)
        target = jnp.where(drafts.counts > 0, blocks, stack.shape[1])  # out of bounds: dropped
        stack = write_tiles(stack, run.layer, target, tokens[drafts.kept])
        return jnp.concatenate([outputs, guessed])[self.outputs], (*after, stack)


def _drafts(num_drafts: jax.Array, query_start: jax.Array, tokens: int, most: int) -> DraftRanges:
    """Return the drafts, int32 [S] of each sequence, which are its last tokens."""
    ranges = TokenRanges.of(num_drafts, min(tokens, len(num_drafts) * most))
    first = query_start[1:] - num_drafts
    sources = jnp.clip(first[ranges.seq_ids] + ranges.offsets, 0, tokens - 1)
    kept = jnp.clip(first[:, None] + jnp.arange(most), 0, tokens - 1)
    return DraftRanges(ranges, sources, kept, num_drafts)
