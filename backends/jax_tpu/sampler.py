"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines: the host's half.

Keeps each row's rules, packs what a step needs of them, and calls the programs that it needs: greedy rows without
rules cost one argmax. Never waits for the device; `Sampled` does, when somebody wants the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import jax
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu import edit
from pagoda.backends.jax_tpu.catalogue import Choose, OnLogits, Remember
from pagoda.backends.jax_tpu.choose import Kind
from pagoda.backends.jax_tpu.logprobs import BEST, sorted_logprobs
from pagoda.backends.jax_tpu.programs import Programs
from pagoda.common.engine.sampling import LogprobsMode, SamplingRules, noise_keys
from pagoda.common.engine.step import Int32, RowStart, StepPlan, TokenLogprobs

_GREEDY: Final = SamplingRules()


@dataclass(frozen=True, slots=True)
class RowState:
    """What sampling knows of a row. `prompt`: int32, its tokens."""

    rules: SamplingRules
    prompt: Int32


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens on their way to the host, int32 [R], and what is needed for logprobs."""

    tokens: jax.Array
    mode: LogprobsMode
    scored: tuple[jax.Array, jax.Array, jax.Array] | None = None  # of `logprobs`
    logits: jax.Array | None = None  # what was scored, when somebody wants more than the device finds

    def logprobs(self, index: int, best: int) -> TokenLogprobs:
        """Of the sequence at `index`: its token and the best `best` (-1: all)."""
        assert self.scored is not None
        one = slice(index, index + 1)
        if self.logits is not None and not 0 <= best <= BEST:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[one], np.asarray(self.tokens)[one], best)
        ids, values, ranks = (np.asarray(part)[one] for part in self.scored)
        return TokenLogprobs(ids[:, : 1 + best], values[:, : 1 + best], ranks)


class Sampler:
    """Chooses one token per sampling row. `history` int32 [rows+1, max_len+1] lives on the device."""

    def __init__(self, programs: Programs, max_rows: int) -> None:
        shape = programs.catalogue.history
        self.history = jax.device_put(np.zeros(shape.shape, np.int32), shape.sharding)
        self.vocab, self.mode = programs.catalogue.model.spec.vocab, programs.catalogue.mode
        self._programs = programs
        self._rows = [RowState(_GREEDY, np.zeros(0, np.int32))] * max_rows

    def start(self, start: RowStart) -> None:
        """A row begins anew. Its tokens go to the device only if its rules look at them there."""
        self._rows[start.row] = RowState(start.rules, start.token_ids[: start.num_prompt])
        if start.rules.has_penalties or any(len(word) > 1 for word in start.rules.bad_words):
            tokens = np.zeros(self.history.shape[1], np.int32)
            tokens[: len(start.token_ids)] = start.token_ids
            self.history = self._programs[Remember()](self.history, np.int32(start.row), tokens)

    def row(self, row: int) -> RowState:
        """What is known of a row."""
        return self._rows[row]

    def sample(self, logits: jax.Array, plan: StepPlan) -> Sampled:
        """Logits float32 [R, V] of the plan's sequences and padding -> the tokens of those that sample."""
        seqs = logits.shape[0]
        sampling = np.flatnonzero(plan.samples).tolist()
        ends = plan.context + np.diff(plan.query_start)
        chosen = {index: self._rows[plan.rows[index]] for index in sampling}
        edited = self._edit(logits, chosen, plan, ends)
        kind, rules = self._rules(seqs, chosen, plan, ends)
        tokens, self.history, drawn = self._programs[Choose(seqs, kind)](edited, self.history, rules)
        tokens.copy_to_host_async()
        wanted = [state.rules.logprobs for state in chosen.values() if state.rules.logprobs is not None]
        if not wanted:
            return Sampled(tokens, self.mode)
        shown = logits if drawn is None else drawn
        scored = self._programs[OnLogits("logprobs", seqs)](shown, tokens)
        many = any(not 0 <= best <= BEST for best in wanted)
        return Sampled(tokens, self.mode, scored, shown if many else None)

    def _rules(
        self, seqs: int, chosen: dict[int, RowState], plan: StepPlan, ends: Int32
    ) -> tuple[Kind, npt.NDArray[np.int32]]:
        """What choosing must do, and int32 [7, R] for `choose.Rules`; who does not sample uses the spare row."""
        packed = np.zeros((7, seqs), np.int32)
        packed[0] = len(self._rows)
        indices = list(chosen)
        packed[0, indices], packed[1, indices] = plan.rows[indices], ends[indices]
        random = [index for index, state in chosen.items() if not state.rules.is_greedy]
        if not random:
            return "greedy", packed
        rules = [chosen[index].rules for index in random]
        seeds = np.array([r.seed for r in rules], np.int64)
        packed[2, random] = noise_keys(seeds, ends[random].astype(np.int64)).view(np.int32)
        real = packed.view(np.float32)
        real[3, random] = [r.temperature for r in rules]
        packed[4, random] = [min(r.top_k, self.vocab) for r in rules]
        real[5, random], real[6, random] = [r.top_p for r in rules], [r.min_p for r in rules]
        filters = any(r.top_k > 0 or r.top_p < 1.0 or r.min_p > 0.0 for r in rules)
        return "filtered" if filters else "random", packed

    def _edit(self, logits: jax.Array, chosen: dict[int, RowState], plan: StepPlan, ends: Int32) -> jax.Array:
        """Logits after penalties, bias and bans."""
        seqs, programs = logits.shape[0], self._programs
        penalised = [(index, state) for index, state in chosen.items() if state.rules.has_penalties]
        if penalised:
            columns = _penalties(penalised, plan, ends, seqs)
            logits = programs[OnLogits("penalise", seqs)](logits, self.history, columns)
        for entries in _pieces(_additions(chosen, ends), edit.ENTRIES):
            logits = programs[OnLogits("adjust", seqs)](logits, _entries(entries, seqs))
        for words in _word_pieces(_words(chosen, plan, ends)):
            logits = programs[OnLogits("ban_words", seqs)](logits, self.history, *_word_arrays(words, seqs))
        if any(state.rules.allowed_token_ids is not None for state in chosen.values()):
            bits = _allowed(chosen, seqs, logits.shape[1])
            logits = programs[OnLogits("mask", seqs)](logits, bits)
        return logits


Entry = tuple[int, int, float]
"""Sequence, token, value to add."""


def _penalties(rows: list[tuple[int, RowState]], plan: StepPlan, ends: Int32, seqs: int) -> Int32:
    """int32 [8, R] as `edit.penalise` reads it."""
    packed = np.zeros((8, seqs), np.int32)
    real = packed.view(np.float32)
    for column, (index, state) in enumerate(rows):
        rules = state.rules
        packed[:4, column] = index, plan.rows[index], len(state.prompt), ends[index]
        real[4:7, column] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    packed[7, 0] = len(rows)
    return packed


def _additions(chosen: dict[int, RowState], ends: Int32) -> Iterator[Entry]:
    """Bias, words of one token, and stops that come too early."""
    for index, state in chosen.items():
        rules = state.rules
        yield from ((index, token, value) for token, value in rules.logit_bias)
        yield from ((index, word[0], -np.inf) for word in rules.bad_words if len(word) == 1)
        if int(ends[index]) - len(state.prompt) < rules.min_tokens:
            yield from ((index, token, -np.inf) for token in rules.stop_ids)


def _pieces(entries: Iterator[Entry], size: int) -> Iterator[list[Entry]]:
    listed = list(entries)
    yield from (listed[at : at + size] for at in range(0, len(listed), size))


def _entries(entries: list[Entry], seqs: int) -> Int32:
    """int32 [3, ENTRIES] as `edit.adjust` reads it."""
    packed = np.zeros((3, edit.ENTRIES), np.int32)
    packed[0] = seqs
    sequences, tokens, values = zip(*entries)
    packed[0, : len(entries)], packed[1, : len(entries)] = sequences, tokens
    packed.view(np.float32)[2, : len(entries)] = values
    return packed


@dataclass(frozen=True, slots=True)
class _Word:
    """A banned word of several tokens; `head` stands from `begin` on in `row` of the history if it is about to come."""

    index: int
    row: int
    begin: int
    head: tuple[int, ...]
    last: int


def _words(chosen: dict[int, RowState], plan: StepPlan, ends: Int32) -> Iterator[_Word]:
    for index, state in chosen.items():
        generated = int(ends[index]) - len(state.prompt)
        for word in state.rules.bad_words:
            if 1 < len(word) <= generated + 1:
                head = word[:-1][-edit.HEADS :]
                yield _Word(index, int(plan.rows[index]), int(ends[index]) - len(head), head, word[-1])


def _word_pieces(words: Iterator[_Word]) -> Iterator[list[_Word]]:
    """The words in lists that fit the program."""
    piece: list[_Word] = []
    tokens = 0
    for word in words:
        if len(piece) == edit.WORDS or tokens + len(word.head) > edit.HEADS:
            yield piece
            piece, tokens = [], 0
        piece.append(word)
        tokens += len(word.head)
    if piece:
        yield piece


def _word_arrays(words: list[_Word], seqs: int) -> tuple[Int32, Int32]:
    """int32 [2, WORDS] and int32 [4, HEADS] as `edit.ban_words` reads them."""
    packed, heads = np.zeros((2, edit.WORDS), np.int32), np.zeros((4, edit.HEADS), np.int32)
    packed[0], heads[0] = seqs, edit.WORDS
    at = 0
    for number, word in enumerate(words):
        packed[:, number] = word.index, word.last
        part = heads[:, at : at + len(word.head)]
        part[0], part[1] = number, word.row
        part[2], part[3] = word.begin + np.arange(len(word.head)), word.head
        at += len(word.head)
    return packed, heads


def _allowed(chosen: dict[int, RowState], seqs: int, vocab: int) -> npt.NDArray[np.uint32]:
    """uint32 [R, ceil(V/32)] as `edit.mask` reads it."""
    bits = np.full((seqs, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, state in chosen.items():
        if state.rules.allowed_token_ids is not None:
            ids = np.asarray(state.rules.allowed_token_ids, np.int64)
            bits[index] = 0
            np.bitwise_or.at(bits[index], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits
