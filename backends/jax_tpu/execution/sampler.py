"""Sampling on the host side: logits -> tokens and logprobs, in the order defined by common.engine.sampling.rules.

Packs the sampling rules of a step's rows and runs only the programs they need: greedy rows without edits cost one
argmax. Never waits for the device; `Sampled.logprobs` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.logit_programs import (
    AdjustAllLogits,
    AdjustLogits,
    BanWords,
    CopyLogits,
    CountTokens,
    MaskLogits,
    PenaliseLogits,
    RankLogprobs,
    RecordDrafts,
    Sample,
    SetCounts,
    SetHistoryRow,
)
from pagoda.backends.jax_tpu.execution.program_kind import StepProgramKind
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.shapes import Plans
from pagoda.backends.jax_tpu.sampling import MAX_LOGPROBS, counts_of, sorted_logprobs
from pagoda.common.engine.sampling.rules import LogprobsMode
from pagoda.common.engine.sampling.state import (
    RowTable,
    SampledRow,
    SampledRows,
    additions,
    allowed,
    banned_words,
    by_sequence,
    dense_additions,
    grammar_masks,
)
from pagoda.common.engine.steps.contract import Int32, RowStart, TokenLogprobs, TokenMasks


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Logprobs of tokens int32 [R], being copied to the host."""

    mode: LogprobsMode
    tokens: jax.Array | Int32
    top_logprobs: tuple[jax.Array, jax.Array, jax.Array]  # of `sampling.logprobs`
    logits: jax.Array | None  # float32 [R, V], for requests of more than MAX_LOGPROBS

    def fetch(self, rows: slice, n: int) -> TokenLogprobs:
        """Wait for some rows; return the logprobs of each token and of the `n` best (-1: all)."""
        if self.logits is not None and not 0 <= n <= MAX_LOGPROBS:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[rows], np.asarray(self.tokens)[rows], n)
        ids, values, ranks = (np.asarray(part)[rows] for part in self.top_logprobs)
        return TokenLogprobs(ids[:, : 1 + n], values[:, : 1 + n], ranks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a step, being copied to the host, and their logprobs."""

    tokens: jax.Array  # int32 [R]; -1 after a rejected draft
    width: int  # rows of logits per sequence
    num_logprobs: dict[int, tuple[slice, int]]  # sequence -> its rows of logits, requested number (-1: all)
    device_logprobs: DeviceLogprobs | None = None

    def fetch(self, first: int, seqs: int, num_drafts: Int32 | None) -> Int32:
        """Wait for the tokens of `seqs` sequences from `first` on, in the form of StepResult."""
        tokens: Int32 = np.asarray(self.tokens).reshape(-1, self.width)[first : first + seqs]
        return tokens[:, 0] if num_drafts is None else tokens[:, : 1 + int(num_drafts.max())]

    def logprobs(self, first: int, seqs: int) -> dict[int, TokenLogprobs]:
        """Wait for the requested logprobs of `seqs` sequences from `first` on, numbered from 0."""
        device_logprobs = self.device_logprobs
        if device_logprobs is None:
            return {}
        sequences = range(first, first + seqs)
        return {
            sequence - first: device_logprobs.fetch(rows, n)
            for sequence, (rows, n) in self.num_logprobs.items()
            if sequence in sequences
        }


class JaxSampler:
    """Samples one token per row of logits. `width`: rows of each sequence in steps with drafts."""

    def __init__(self, programs: CompiledPrograms[StepProgramSet, StepProgramKind], max_rows: int) -> None:
        shape = programs.program_set.history
        self.history = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)  # int32 [rows+1, max_len+1]
        shape = programs.program_set.counts
        self._counts = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)  # of rows with penalties
        self.rows = RowTable(max_rows)
        self.vocab = programs.program_set.model.spec.vocab
        self.mode = programs.program_set.mode
        self.width = programs.program_set.shapes.width
        self._shards = programs.program_set.model.shards
        self._programs = programs
        self._has_drafter = programs.program_set.drafter is not None
        # So that a row is not sampled by another program because another row has filters.
        self._one_kind = programs.program_set.model.kernel.batch_invariant

    def start(self, start: RowStart) -> None:
        """Initialise a row. Its tokens are copied to the device only if its rules or a drafter read them there."""
        self.rows.start(start, self.vocab)
        if start.rules.reads_history or self._has_drafter:
            tokens = np.zeros(self.history.shape[1], np.int32)
            tokens[: len(start.token_ids)] = start.token_ids
            self.history = self._programs[SetHistoryRow()](self.history, np.int32(start.row), tokens)
        if start.rules.has_penalties:
            counts = counts_of(start.token_ids, start.num_prompt, self._counts.shape[1])
            self._counts = self._programs[SetCounts()](self._counts, np.int32(start.row), counts)

    def sample(self, logits: jax.Array, plans: Plans, masks: Mapping[int, TokenMasks] | None = None) -> Sampled:
        """Sample from logits float32 [R, V]: each shard's sequences, padded to R / shards rows per shard.

        `masks`: of sequences in `masked` of the plans, by shard.
        """
        rows = logits.shape[0]
        seqs = logits.shape[0] // self._shards
        width = self.width if any(plan.num_drafts is not None for plan in plans.values()) else 1
        sampled = SampledRows.of(plans, seqs, self.rows, width)
        with_drafts = self.width > 1
        rules = (
            sampled.pack_with_drafts(plans, rows, len(self.rows)) if with_drafts else sampled.pack(rows, len(self.rows))
        )
        edits_logits = bool(masks) or any(sampled.columns[field].any() for field in ("penalised", "edited", "masked"))
        if edits_logits and self.mode.startswith("raw") and sampled.columns["logprobs"].any():
            edited = self._programs[CopyLogits(seqs)](logits)
        else:
            edited = logits
        edited = self._edit(edited, sampled, masks or {}, width, rules)
        kind = "filtered" if self._one_kind and sampled.kind == "random" else sampled.kind
        program = self._programs[Sample(seqs, kind, width)]
        tokens, self.history, processed = program(edited, self.history, rules)
        tokens.copy_to_host_async()
        if sampled.columns["penalised"].any():
            self._counts = self._programs[CountTokens(seqs, width)](self._counts, rules, tokens)
        num_logprobs = {
            sequence: (slice(own[0].index, own[-1].index + 1), own[0].state.rules.logprobs or 0)
            for sequence, own in by_sequence(sampled.where("logprobs"), width)
        }
        if not num_logprobs:
            return Sampled(tokens, width, num_logprobs)
        scored = logits if processed is None else processed
        counts = [number for _, number in num_logprobs.values()]
        return Sampled(tokens, width, num_logprobs, self.score(scored, tokens, seqs, counts))

    def score(
        self, logits: jax.Array, tokens: jax.Array | Int32, seqs: int, num_logprobs: Iterable[int]
    ) -> DeviceLogprobs:
        """Enqueue the logprobs of tokens int32 [R] in logits float32 [R, V], of which each shard has `seqs` rows.

        `num_logprobs`: the numbers that will be fetched (-1: all).
        """
        top_logprobs = self._programs[RankLogprobs(seqs)](logits, tokens)
        needs_logits = any(not 0 <= n <= MAX_LOGPROBS for n in num_logprobs)
        return DeviceLogprobs(self.mode, tokens, top_logprobs, logits if needs_logits else None)

    def _edit(
        self, logits: jax.Array, sampled: SampledRows, grammar: Mapping[int, TokenMasks], width: int, rules: Int32
    ) -> jax.Array:
        """Apply bias, bans, token masks and penalties. `rules`: the input of the `Sample` program."""
        rows = logits.shape[0]
        programs = self._programs
        seqs = rows // self._shards
        penalised = sampled.where("penalised")
        edited = sampled.where("edited")
        if width > 1 and (penalised or edited):
            self.history = programs[RecordDrafts(seqs)](self.history, rules)
        shift_rows = (rules[7],) if self.width > 1 else ()
        if edited:
            for entries in additions(edited, rows):
                logits = programs[AdjustLogits(seqs)](logits, entries)
            for edits, indices in dense_additions(edited):
                assert edits.dense is not None, "that is what they are selected by"
                values = np.zeros(logits.shape[1], np.float32)
                chosen = np.zeros(rows, np.bool_)
                values[: self.vocab] = edits.dense
                chosen[indices] = True
                logits = programs[AdjustAllLogits(seqs)](logits, values, chosen)
            for words, heads in banned_words(edited, rows):
                program = programs[BanWords(seqs)]
                logits = program(logits, self.history, words, heads, *shift_rows)
        if masks := allowed(sampled.where("masked"), grammar_masks(grammar, seqs, width)):
            count = next(size for size in programs.program_set.masked_rows(seqs) if size >= len(masks))
            bits = np.zeros((count, -(-logits.shape[1] // 8)), np.uint8)
            masked = np.full(count, rows, np.int32)
            for place, (index, own) in enumerate(masks.items()):
                own_bytes = own.view(np.uint8)[: bits.shape[1]]
                bits[place, : len(own_bytes)] = own_bytes
                masked[place] = index
            logits = programs[MaskLogits(seqs, rows=count)](logits, bits, masked)
        if penalised:
            packed = _penalties(penalised, rows, width, drafts=self.width > 1)
            penalise = programs[PenaliseLogits(seqs)]
            if self.width > 1:
                logits = penalise(logits, self._counts, packed, self.history, rules[7])
            else:
                logits = penalise(logits, self._counts, packed)
        return logits


def _penalties(penalised: Sequence[SampledRow], rows: int, width: int, *, drafts: bool) -> Int32:
    """Return the argument of `sampling.penalise` for `rows` rows of logits, int32 [4, rows].

    `drafts`: of an engine with drafts, [6, rows]: also how many tokens are known, and how many of them are drafts.
    """
    packed = np.zeros((6 if drafts else 4, rows), np.int32)
    packed[0] = -1
    real = packed.view(np.float32)
    real[1] = 1.0
    for sampled in penalised:
        rules = sampled.state.rules
        index = sampled.index
        packed[0, index] = sampled.row
        real[1:4, index] = rules.penalties
        packed[4:, index] = (sampled.known, index % width)[: len(packed) - 4]
    return packed
