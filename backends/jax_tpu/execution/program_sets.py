"""The programs of a generating or pooling engine, by key, and how each is lowered. Needs shapes only, no weights.

The forward pass is one program; penalties, sampling and logprobs are small programs on its logits, so that rarely used
features do not multiply the number of large programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.logit_programs import (
    MASKED_ROWS,
    UNMASKED_EDITS,
    CountTokens,
    MaskLogits,
    RankLogprobs,
    RecordDrafts,
    Sample,
    SetCounts,
    SetHistoryRow,
)
from pagoda.backends.jax_tpu.execution.program_kind import (
    ProgramParts,
    StepContext,
    StepProgramKind,
    lower,
    per_shard,
    shapes_of,
)
from pagoda.backends.jax_tpu.execution.step_input import MIN_POOL_TOKENS, PoolInput, PoolShape
from pagoda.backends.jax_tpu.execution.step_programs import (
    FEW_COPIES,
    SCORE_TOKENS,
    CopyStates,
    Draft,
    Forward,
    Pool,
    ScorePrompt,
    WriteAdapter,
    WriteRows,
)
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.parallel import replicated
from pagoda.common.config.engine import Limits
from pagoda.common.engine.sampling.state import KINDS
from pagoda.common.engine.steps.shapes import ShapeLadder

FEW_ROWS: Final = 16
"""Rows of media that the smallest `WriteRows` writes."""


@dataclass(frozen=True, slots=True)
class StepProgramSet(StepContext):
    """The programs of one generating model with these shapes."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits."""
        return {
            "logprobs_mode": self.mode,
            "num_blocks": self.num_blocks[0] if len(self.num_blocks) == 1 else list(self.num_blocks),
            "max_drafts": self.shapes.width - 1,
            **({"batch_invariant": True} if self.model.kernel.batch_invariant else {}),
            **({"media_rows": self.media_rows} if self.media_rows else {}),
        }

    @property
    def copy_counts(self) -> tuple[int, int]:
        """Return the sizes of `CopyStates`: a row takes one snapshot in a step, and starts from one, at most."""
        return FEW_COPIES, FEW_COPIES + 2 * self.rows

    def __iter__(self) -> Iterator[StepProgramKind]:
        """Yield the key of every program, the largest first."""
        shapes = sorted(self.shapes, reverse=True)
        yield from map(Forward, shapes)
        yield from map(Draft, shapes if self.drafter is not None else ())
        yield from (ScorePrompt(*kind) for kind in sorted({(shape.tokens, shape.adapted) for shape in shapes}))
        if self.shapes.adapters:
            yield WriteAdapter()
        yield from map(WriteRows, reversed(self.written_rows))
        yield from (SetHistoryRow(), SetCounts())
        for pool in self.model.state_pools:
            yield from (CopyStates(pool, count) for count in self.copy_counts)
        rows = {width: [seqs * width for seqs in self.shapes.seqs] for width in self.shapes.widths}
        for width, sizes in rows.items():
            yield from (Sample(size, kind, width) for size in sizes for kind in KINDS)
            yield from (CountTokens(size, width) for size in sizes)
            yield from (RecordDrafts(size) for size in sizes if width > 1)
        for size in sorted({size for sizes in rows.values() for size in sizes}):
            yield from (program(size) for program in UNMASKED_EDITS)
            yield from (MaskLogits(size, rows=count) for count in self.masked_rows(size))
        yield RankLogprobs(SCORE_TOKENS)

    @property
    def written_rows(self) -> tuple[int, ...]:
        """Return the sizes of the `WriteRows` programs, ascending; the largest writes every row of a shard."""
        sizes = []
        size = FEW_ROWS
        while self.media_rows and size < self.media_rows:
            sizes.append(size)
            size *= 8
        return (*sizes, self.media_rows) if self.media_rows else ()

    def masked_rows(self, seqs: int) -> tuple[int, ...]:
        """Return the sizes of the `MaskLogits` programs of `seqs` rows of logits per shard."""
        rows = seqs * self.model.shards
        return (*(size for size in MASKED_ROWS if size < rows), rows)

    def lower(self, key: StepProgramKind) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        return lower(self.model, key.parts(self), key.outputs(self), overlaps=key.overlaps(self))

    def signature(self, key: StepProgramKind) -> str:
        """Return logprobs mode, kernel choice, and the shapes, dtypes and shardings of all arguments."""
        return repr([self.mode, self.model.kernel, *shapes_of(key.parts(self).arguments)])


@dataclass(frozen=True, slots=True)
class PoolProgramSet:
    """The programs of a pooling model: one per bucket of tokens, with outputs per prompt or per token."""

    model: Model
    limits: Limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits. There is no persistent KV cache."""
        return {"num_blocks": 0}

    def __iter__(self) -> Iterator[Pool]:
        """Yield the key of every program, the largest first."""
        assert self.model.spec.pooler is not None, "the model pools"
        per_prompt = () if self.model.spec.pooler.kind == "all" else (False,)
        for tokens in reversed(token_ladder(self.limits).sizes):
            yield from (Pool(self.shape_for(tokens, of_tokens)) for of_tokens in (True, *per_prompt))

    def shape_for(self, tokens: int, of_tokens: bool) -> PoolShape:
        """Return the smallest shape that fits `tokens`. `of_tokens`: one output per token instead of per prompt."""
        size = token_ladder(self.limits).bucket_for(tokens)
        pages = -(-min(self.limits.max_model_len, size) // self.limits.block_size)
        return PoolShape(size, min(self.limits.max_num_seqs, size), pages, of_tokens)

    def lower(self, key: Pool) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        parts = ProgramParts(partial(self._pool, key), (self.model.leaves, self._packed(key)))
        return lower(self.model, parts, replicated(self.model.mesh))

    def signature(self, key: Pool) -> str:
        """Return the kernel choice and the shapes, dtypes and shardings of all arguments."""
        return repr([self.model.kernel, *shapes_of((self.model.leaves, self._packed(key)))])

    def _packed(self, key: Pool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((key.shape.size,), jnp.dtype(jnp.int32), sharding=replicated(self.model.mesh))

    def _pool(self, key: Pool, leaves: Leaves, packed: jax.Array) -> jax.Array:
        def run(leaves: Leaves, packed: jax.Array) -> jax.Array:
            return self.model.decoder(leaves).pooled(PoolInput.unpack(packed, key.shape, self.model.kernel))

        pooled: jax.Array = per_shard(self.model, run, (tuple(self.model.axes), ""), "")(leaves, packed)
        return pooled


def token_ladder(limits: Limits) -> ShapeLadder:
    """Return the padded numbers of tokens, doubling up to the longest step."""
    longest = -(-max(limits.max_num_batched_tokens, limits.max_model_len) // MIN_POOL_TOKENS) * MIN_POOL_TOKENS
    return ShapeLadder.between(MIN_POOL_TOKENS, longest)
