"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines: the host's half.

Packs what a step needs of its rows' rules, and calls the programs that it needs: greedy rows without
rules cost one argmax. Never waits for the device; `Sampled` does, when somebody wants the numbers.
"""

from __future__ import annotations

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
from pagoda.common.engine.step import RowStart, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens on their way to the host, int32 [R], and what is needed for logprobs."""

    tokens: jax.Array
    mode: LogprobsMode
    wanted: dict[int, int]  # how many logprobs, by sequence
    scored: tuple[jax.Array, jax.Array, jax.Array] | None = None  # of `logprobs`
    logits: jax.Array | None = None  # what was scored, when somebody wants more than the device finds

    def logprobs(self, among: range) -> dict[int, TokenLogprobs]:
        """Of every sequence among these that asked: its token and the best few (-1: all)."""
        return {index: self._logprobs(index, best) for index, best in self.wanted.items() if index in among}

    def _logprobs(self, index: int, best: int) -> TokenLogprobs:
        assert self.scored is not None
        one = slice(index, index + 1)
        if self.logits is not None and not 0 <= best <= BEST:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[one], np.asarray(self.tokens)[one], best)
        ids, values, ranks = (np.asarray(part)[one] for part in self.scored)
        return TokenLogprobs(ids[:, : 1 + best], values[:, : 1 + best], ranks)


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
        wanted = {place.index: place.state.rules.logprobs or 0 for place in chosen.where("logprobs")}
        if not wanted:
            return Sampled(tokens, self.mode, wanted)
        shown = logits if drawn is None else drawn
        scored = self._programs[OnLogits("logprobs", seqs)](shown, tokens)
        many = any(not 0 <= best <= BEST for best in wanted.values())
        return Sampled(tokens, self.mode, wanted, scored, shown if many else None)

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
