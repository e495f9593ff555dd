"""Sampling on the host side: logits -> tokens and logprobs, in the order defined by common.engine.sampling.

Packs the sampling rules of a step's rows and runs only the programs they need: greedy rows without edits cost one
argmax. Never waits for the device; `Sampled.logprobs` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.program_keys import Key, LogitsProgram, Sample, SetHistoryRow, StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.shapes import Plans
from pagoda.backends.jax_tpu.sampling.device import MAX_LOGPROBS, sorted_logprobs
from pagoda.common.engine.logit_edits import additions, allowed, allowed_bits, banned_words, penalties
from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.sampling_state import RowTable, SampledRows
from pagoda.common.engine.step import RowStart, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a step, being copied to the host, and the inputs of its logprobs."""

    tokens: jax.Array  # int32 [R]
    mode: LogprobsMode
    num_logprobs: dict[int, int]  # sequence -> requested number; -1: all
    top_logprobs: tuple[jax.Array, jax.Array, jax.Array] | None = None  # of `device.logprobs`
    logits: jax.Array | None = None  # for requests of more than MAX_LOGPROBS

    def logprobs(self, sequences: range) -> dict[int, TokenLogprobs]:
        """Return the logprobs of the sampled and top tokens, for those of `sequences` that requested them."""
        return {index: self._logprobs(index, n) for index, n in self.num_logprobs.items() if index in sequences}

    def _logprobs(self, index: int, n: int) -> TokenLogprobs:
        assert self.top_logprobs is not None
        row = slice(index, index + 1)
        if self.logits is not None and not 0 <= n <= MAX_LOGPROBS:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[row], np.asarray(self.tokens)[row], n)
        ids, values, ranks = (np.asarray(part)[row] for part in self.top_logprobs)
        return TokenLogprobs(ids[:, : 1 + n], values[:, : 1 + n], ranks)


class JaxSampler:
    """Samples one token per row."""

    def __init__(self, programs: CompiledPrograms[StepProgramSet, Key], max_rows: int) -> None:
        shape = programs.program_set.history
        self.history = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)  # int32 [rows+1, max_len+1]
        self.rows = RowTable(max_rows)
        self.vocab, self.mode = programs.program_set.model.spec.vocab, programs.program_set.mode
        self._shards = programs.program_set.model.shards
        self._programs = programs

    def start(self, start: RowStart) -> None:
        """Initialise a row. Its tokens are copied to the device only if its rules read them there."""
        self.rows.start(start, self.vocab)
        if start.rules.has_penalties or any(len(word) > 1 for word in start.rules.bad_words):
            tokens = np.zeros(self.history.shape[1], np.int32)
            tokens[: len(start.token_ids)] = start.token_ids
            self.history = self._programs[SetHistoryRow()](self.history, np.int32(start.row), tokens)

    def sample(self, logits: jax.Array, plans: Plans) -> Sampled:
        """Sample from logits float32 [R, V]: each shard's sequences, padded to R / shards rows per shard."""
        seqs = logits.shape[0] // self._shards
        sampled = SampledRows.of(plans, seqs, self.rows)
        edited = self._edit(logits, sampled, plans)
        rules = sampled.pack(logits.shape[0], len(self.rows))
        tokens, self.history, processed = self._programs[Sample(seqs, sampled.kind)](edited, self.history, rules)
        tokens.copy_to_host_async()
        num_logprobs = {row.index: row.state.rules.logprobs or 0 for row in sampled.where("shown")}
        if not num_logprobs:
            return Sampled(tokens, self.mode, num_logprobs)
        scored = logits if processed is None else processed
        top_logprobs = self._programs[LogitsProgram("logprobs", seqs)](scored, tokens)
        needs_logits = any(not 0 <= n <= MAX_LOGPROBS for n in num_logprobs.values())
        return Sampled(tokens, self.mode, num_logprobs, top_logprobs, scored if needs_logits else None)

    def _edit(self, logits: jax.Array, sampled: SampledRows, plans: Plans) -> jax.Array:
        """Apply penalties, bias, bans and token masks."""
        rows, programs = logits.shape[0], self._programs
        seqs = rows // self._shards
        if penalised := sampled.where("penalised"):
            logits = programs[LogitsProgram("penalise", seqs)](logits, self.history, penalties(penalised, rows))
        if edited := sampled.where("edited"):
            for entries in additions(edited, rows):
                logits = programs[LogitsProgram("adjust", seqs)](logits, entries)
            for words, heads in banned_words(edited, rows):
                logits = programs[LogitsProgram("ban_words", seqs)](logits, self.history, words, heads)
        if masks := allowed(sampled.where("masked"), plans, seqs, logits.shape[1]):
            bits = allowed_bits({}, rows, logits.shape[1])
            bits[list(masks)] = np.stack(list(masks.values()))
            logits = programs[LogitsProgram("mask", seqs)](logits, bits)
        return logits
