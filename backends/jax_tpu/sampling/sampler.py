"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines: the host's half.

Packs what a step needs of its rows' rules, and calls the programs that it needs: greedy rows without
rules cost one argmax. Never waits for the device; `Sampled` does, when somebody wants the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.program_keys import Catalogue, Choose, Key, OnLogits, Remember
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.shapes import Plans
from pagoda.backends.jax_tpu.sampling.device import BEST, sorted_logprobs
from pagoda.common.engine.logit_edits import additions, allowed, allowed_bits, banned_words, grammar_masks, penalties
from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.sampling_state import RowTable, SampledRows
from pagoda.common.engine.step import Int32, RowStart, TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Logprobs of tokens int32 [R] on their way to the host."""

    mode: LogprobsMode
    tokens: jax.Array | Int32
    scored: tuple[jax.Array, jax.Array, jax.Array]  # of `device.logprobs`
    logits: jax.Array | None  # float32 [R, V], where a request wants more tokens than the device reports

    def fetch(self, rows: slice, best: int) -> TokenLogprobs:
        """Wait for some rows: each token and the `best` best (-1: all)."""
        if self.logits is not None and not 0 <= best <= BEST:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[rows], np.asarray(self.tokens)[rows], best)
        ids, values, ranks = (np.asarray(part)[rows] for part in self.scored)
        return TokenLogprobs(ids[:, : 1 + best], values[:, : 1 + best], ranks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step on their way to the host."""

    tokens: jax.Array  # int32 [R]
    best: dict[int, int]  # logprobs to report, by row of logits
    device_logprobs: DeviceLogprobs | None = None

    def fetch(self, first: int, seqs: int) -> Int32:
        """Wait for the tokens of `seqs` rows from `first` on."""
        return np.asarray(self.tokens)[first : first + seqs]

    def logprobs(self, first: int, seqs: int) -> dict[int, TokenLogprobs]:
        """Wait for the logprobs of `seqs` rows from `first` on, numbered from 0."""
        scored = self.device_logprobs
        if scored is None:
            return {}
        rows = range(first, first + seqs)
        return {
            index - first: scored.fetch(slice(index, index + 1), best)
            for index, best in self.best.items()
            if index in rows
        }


class JaxSampler:
    """Chooses one token per sampling row. `history` int32 [rows+1, max_len+1] lives on the device."""

    def __init__(self, programs: CompiledPrograms[Catalogue, Key], max_rows: int) -> None:
        shape = programs.catalogue.history
        self.history = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
        self.rows = RowTable(max_rows)
        self.vocab, self.mode = programs.catalogue.model.spec.vocab, programs.catalogue.mode
        self._shards = programs.catalogue.model.shards
        self._programs = programs

    def start(self, start: RowStart) -> None:
        """A row begins anew. Its tokens go to the device only if its rules look at them there."""
        self.rows.start(start, self.vocab)
        if start.rules.reads_history:
            tokens = np.zeros(self.history.shape[1], np.int32)
            tokens[: len(start.token_ids)] = start.token_ids
            self.history = self._programs[Remember()](self.history, np.int32(start.row), tokens)

    def sample(self, logits: jax.Array, plans: Plans) -> Sampled:
        """Logits float32 [R, V] of the sequences of every shard's plan and padding -> the tokens of those that sample.

        Each shard has as many of the R rows.
        """
        seqs = logits.shape[0] // self._shards
        chosen = SampledRows.of(plans, seqs, self.rows)
        edited = self._edit(logits, chosen, plans)
        rules = chosen.pack(logits.shape[0], len(self.rows))
        tokens, self.history, drawn = self._programs[Choose(seqs, chosen.kind)](edited, self.history, rules)
        tokens.copy_to_host_async()
        best = {row.index: row.state.rules.logprobs or 0 for row in chosen.where("logprobs")}
        if not best:
            return Sampled(tokens, best)
        return Sampled(tokens, best, self.score(logits if drawn is None else drawn, tokens, seqs, best.values()))

    def score(self, logits: jax.Array, tokens: jax.Array | Int32, seqs: int, best: Iterable[int]) -> DeviceLogprobs:
        """Enqueue the logprobs of tokens int32 [R] in logits float32 [R, V], of which each shard has `seqs` rows.

        `best`: how many best tokens will be fetched of any row (-1: all).
        """
        scored = self._programs[OnLogits("logprobs", seqs)](logits, tokens)
        many = any(not 0 <= count <= BEST for count in best)
        return DeviceLogprobs(self.mode, tokens, scored, logits if many else None)

    def _edit(self, logits: jax.Array, chosen: SampledRows, plans: Plans) -> jax.Array:
        """Logits after penalties, bias and bans."""
        total, programs = logits.shape[0], self._programs
        seqs = total // self._shards
        if penalised := chosen.where("penalised"):
            logits = programs[OnLogits("penalise", seqs)](logits, self.history, penalties(penalised, total))
        if edited := chosen.where("edited"):
            for entries in additions(edited, total):
                logits = programs[OnLogits("adjust", seqs)](logits, entries)
            for words, heads in banned_words(edited, total):
                logits = programs[OnLogits("ban_words", seqs)](logits, self.history, words, heads)
        if masks := allowed(chosen.where("masked"), grammar_masks(plans, seqs), logits.shape[1]):
            bits = allowed_bits({}, total, logits.shape[1])
            bits[list(masks)] = np.stack(list(masks.values()))
            logits = programs[OnLogits("mask", seqs)](logits, bits)
        return logits
