"""The small programs of a generating engine: sampling, edits of logits, and the tokens and counts of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu import sampling
from pagoda.backends.jax_tpu.execution.program_kind import ProgramParts, StepContext, StepProgramKind, per_shard
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.model.roofline import RooflineCost
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import DATA, named_sharding, replicated
from pagoda.common.engine.sampling import logit_edits
from pagoda.common.engine.sampling import state as sampling_state
from pagoda.common.engine.sampling.state import Kind

MASKED_ROWS: Final = 8, 64
"""Rows of a `MaskLogits` program, besides all rows of logits."""


@dataclass(frozen=True, slots=True)
class RowsProgram(StepProgramKind):
    """A program over rows of logits [R, V]. R is `seqs` times the number of shards."""

    seqs: int  # rows of logits

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.seqs,)

    @property
    def data_trips(self) -> int:
        return self.seqs


@dataclass(frozen=True, slots=True)
class Sample(RowsProgram):
    """(logits [R, V], history, rules [7, R]) -> (tokens [R], history, processed logits); the history is donated.

    Of an engine with drafts the rules are [9, R], and the
    tokens are -1 after a sequence's first rejected draft.
    """

    kind: Kind
    width: int = 1  # rows of logits per sequence

    @property
    def label(self) -> str:
        return f"sample {self.kind} {self.seqs} rows"

    @property
    def variant(self) -> object:
        return type(self), self.kind

    def json_fields(self, page_size: int) -> dict[str, Any]:
        return {"sampled_rows": self.seqs}

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return _logits_cost(model, self.seqs)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        shapes = context.shapes
        run: Callable[..., Any] = sampling.sample
        if shapes.width > 1:
            run = partial(sampling.sample_drafts, self.width, shapes.guesses)
        returns_logits = context.mode.startswith("processed")
        function = partial(run, self.kind, returns_logits, model.kernel, model.mesh)
        arguments = (context.logits(self.seqs), context.history, context.rules(self.seqs))
        return ProgramParts(function, arguments, (1,))

    def outputs(self, context: StepContext) -> Any:
        everywhere = replicated(context.model.mesh)
        return everywhere, everywhere, named_sharding(context.model.mesh, "R.")


@dataclass(frozen=True, slots=True)
class LogitsProgram(RowsProgram):
    """An edit or a copy of logits [R, V], or their logprobs; edits donate them.

    Edits that read the history have another argument if the engine has drafts: `SampledRows.pack_with_drafts`[7].
    """

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        cost = _logits_cost(model, self.seqs)
        return RooflineCost(2 * cost.bytes, 0)

    def outputs(self, context: StepContext) -> Any:
        return named_sharding(context.model.mesh, "R.")


@dataclass(frozen=True, slots=True)
class PenaliseLogits(LogitsProgram):
    """Subtract the penalties of repeated tokens."""

    @property
    def label(self) -> str:
        return f"penalise {self.seqs} rows"

    def parts(self, context: StepContext) -> ProgramParts:
        logits = context.logits(self.seqs)
        drafts = context.shapes.width - 1
        packed = context.array((6 if drafts else 4, logits.shape[0]), jnp.int32, ".R")
        before = (context.history,) * bool(drafts)
        shift_rows = _shift_rows(context, self.seqs)
        axes = "R.", "R.", ".R", *("" for _ in before), *("R" for _ in shift_rows)
        function = per_shard(context.model, partial(_penalise, context.rows, drafts), axes, "R.")
        return ProgramParts(function, (logits, context.counts, packed, *before, *shift_rows), (0,))


@dataclass(frozen=True, slots=True)
class AdjustLogits(LogitsProgram):
    """Change a few entries of the logits."""

    @property
    def label(self) -> str:
        return f"adjust {self.seqs} rows"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(0, 0)  # a few entries

    def parts(self, context: StepContext) -> ProgramParts:
        entries = context.array((3, sampling_state.MAX_ADDITIONS), jnp.int32)
        return ProgramParts(sampling.adjust, (context.logits(self.seqs), entries), (0,))


@dataclass(frozen=True, slots=True)
class AdjustAllLogits(LogitsProgram):
    """Change all logits of some rows."""

    @property
    def label(self) -> str:
        return f"adjust_all {self.seqs} rows"

    def parts(self, context: StepContext) -> ProgramParts:
        logits = context.logits(self.seqs)
        rows, vocab = logits.shape
        values = context.array((vocab,), jnp.float32)
        chosen = context.array((rows,), jnp.bool_)
        return ProgramParts(sampling.adjust_all, (logits, values, chosen), (0,))


@dataclass(frozen=True, slots=True)
class BanWords(LogitsProgram):
    """Ban the last tokens of words whose first ones a row ends with."""

    @property
    def label(self) -> str:
        return f"ban_words {self.seqs} rows"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(0, 0)  # a few entries

    def parts(self, context: StepContext) -> ProgramParts:
        words = context.array((2, sampling_state.MAX_WORDS), jnp.int32)
        heads = context.array((4, logit_edits.MAX_WORD_HEADS), jnp.int32)
        shift_rows = _shift_rows(context, self.seqs)
        return ProgramParts(_ban_words, (context.logits(self.seqs), context.history, words, heads, *shift_rows), (0,))


@dataclass(frozen=True, slots=True)
class MaskLogits(LogitsProgram):
    """Ban the tokens that the bitmasks of some rows exclude."""

    rows: int  # how many rows of logits have a mask at most, of all shards

    @property
    def label(self) -> str:
        return f"mask {self.rows} of {self.seqs} rows"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.seqs, self.rows

    def parts(self, context: StepContext) -> ProgramParts:
        logits = context.logits(self.seqs)
        bits = context.array((self.rows, -(-logits.shape[1] // 8)), jnp.uint8)
        masked = context.array((self.rows,), jnp.int32)
        return ProgramParts(per_shard(context.model, _mask, ("R.", "", ""), "R."), (logits, bits, masked), (0,))


@dataclass(frozen=True, slots=True)
class CopyLogits(LogitsProgram):
    """Copy the logits, which edits then donate."""

    @property
    def label(self) -> str:
        return f"copy {self.seqs} rows"

    def parts(self, context: StepContext) -> ProgramParts:
        return ProgramParts(jnp.copy, (context.logits(self.seqs),))


@dataclass(frozen=True, slots=True)
class RankLogprobs(LogitsProgram):
    """(logits [R, V], tokens [R]) -> the logprobs of the tokens, their ranks, and the best tokens."""

    @property
    def label(self) -> str:
        return f"logprobs {self.seqs} rows"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return _logits_cost(model, self.seqs)

    def parts(self, context: StepContext) -> ProgramParts:
        logits = context.logits(self.seqs)
        run = partial(sampling.logprobs, context.mode)
        function = per_shard(context.model, run, ("R.", "R"), ("R.", "R.", "R"))
        return ProgramParts(function, (logits, context.array((logits.shape[0],), jnp.int32)))

    def outputs(self, context: StepContext) -> Any:
        return replicated(context.model.mesh)


UNMASKED_EDITS: Final = (PenaliseLogits, AdjustLogits, AdjustAllLogits, BanWords, CopyLogits, RankLogprobs)
"""The programs over logits that have one size per number of rows."""


@dataclass(frozen=True, slots=True)
class SetHistoryRow(StepProgramKind):
    """(history, row, tokens [length]) -> history with that row replaced; the history is donated."""

    @property
    def label(self) -> str:
        return "set history row"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(2 * (model.max_len + 1) * 4, 0)

    def parts(self, context: StepContext) -> ProgramParts:
        history = context.history
        tokens = context.array(history.shape[1:], jnp.int32)
        return ProgramParts(_set_history_row, (history, context.array((), jnp.int32), tokens), (0,))

    def outputs(self, context: StepContext) -> Any:
        return replicated(context.model.mesh)


@dataclass(frozen=True, slots=True)
class SetCounts(StepProgramKind):
    """(counts, row, counts uint8 [2, V] of that row) -> counts; the counts are donated."""

    @property
    def label(self) -> str:
        return "set token counts of a row"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(2 * 2 * padded(model.spec.vocab, model.tensor), 0)

    def parts(self, context: StepContext) -> ProgramParts:
        counts = context.counts
        values = context.array((2, counts.shape[1]), jnp.uint8)
        function = per_shard(context.model, partial(_set_counts, context.rows), ("R.", "", ""), "R.")
        return ProgramParts(function, (counts, context.array((), jnp.int32), values), (0,))

    def outputs(self, context: StepContext) -> Any:
        return named_sharding(context.model.mesh, "R.")


@dataclass(frozen=True, slots=True)
class CountTokens(RowsProgram):
    """(counts, rules, tokens [R]) -> counts with the tokens that `Sample` returned; the counts are donated."""

    width: int = 1

    @property
    def label(self) -> str:
        return f"count tokens of {self.seqs} rows"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(0, 0)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        function = per_shard(model, partial(_count_tokens, context.rows, self.width), ("R.", "", ""), "R.")
        tokens = context.array((model.shards * self.seqs,), jnp.int32)
        return ProgramParts(function, (context.counts, context.rules(self.seqs), tokens), (0,))

    def outputs(self, context: StepContext) -> Any:
        return named_sharding(context.model.mesh, "R.")


@dataclass(frozen=True, slots=True)
class RecordDrafts(RowsProgram):
    """(history, rules [9, R]) -> history with the drafts of a step; the history is donated."""

    @property
    def label(self) -> str:
        return f"record drafts {self.seqs} rows"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(2 * self.seqs * 4, 0)

    def parts(self, context: StepContext) -> ProgramParts:
        function = partial(sampling.record_drafts, context.shapes.guesses)
        return ProgramParts(function, (context.history, context.rules(self.seqs)), (0,))

    def outputs(self, context: StepContext) -> Any:
        return replicated(context.model.mesh)


def _logits_cost(model: Model, seqs: int) -> RooflineCost:
    """Return the cost of reading the logits once."""
    return RooflineCost(seqs * padded(model.spec.vocab, model.tensor) * 4, 0)


def _shift_rows(context: StepContext, seqs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the argument of edits that read the history of an engine with drafts."""
    rows = context.model.shards * seqs
    return (context.array((rows,), jnp.int32),) if context.shapes.width > 1 else ()


def _own_rows(rows: jax.Array, count: int) -> jax.Array:
    """Return the indices of rows of the engine among a shard's `count`, which is the padding row's, for all others."""
    own = rows - jax.lax.axis_index(DATA) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _set_counts(rows: int, counts: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    return sampling.set_counts(counts, _own_rows(row, rows), values)


def _count_tokens(rows: int, width: int, counts: jax.Array, rules: jax.Array, tokens: jax.Array) -> jax.Array:
    return sampling.count_tokens(width, counts, _own_rows(rules[0], rows), tokens)


def _penalise(
    rows: int, drafts: int, logits: jax.Array, counts: jax.Array, packed: jax.Array, *of_drafts: jax.Array
) -> jax.Array:
    """Apply `sampling.penalise` to a shard's rows [S, V]; `packed` also has tokens known and drafts among them."""
    own = jnp.where(packed[0] < 0, -1, _own_rows(packed[0], rows))
    ahead = None
    if drafts:
        history, shift_rows = of_drafts
        known = packed[4] - sampling.shift_by_row(history, shift_rows)
        ahead = sampling.tokens_ahead(history, packed[0], known, packed[5], drafts)
    return sampling.penalise(logits, counts, packed.at[0].set(own), ahead)


def _mask(logits: jax.Array, bits: jax.Array, rows: jax.Array) -> jax.Array:
    return sampling.mask(logits, bits, rows - jax.lax.axis_index(DATA) * logits.shape[0])


def _ban_words(
    logits: jax.Array, history: jax.Array, words: jax.Array, heads: jax.Array, *shift_rows: jax.Array
) -> jax.Array:
    for rows_of_all in shift_rows:
        heads = sampling.shift_heads(words, heads, sampling.shift_by_row(history, rows_of_all))
    return sampling.ban_words(logits, history, words, heads)


def _set_history_row(history: jax.Array, row: jax.Array, tokens: jax.Array) -> jax.Array:
    return history.at[row].set(tokens)
