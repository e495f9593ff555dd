"""Logits -> tokens and logprobs, by the order that common.engine.sampling defines: the host's half.

Packs what a step needs of its rows' rules, and calls the programs that it needs: greedy rows without
rules cost one argmax. Never waits for the device; `Sampled` does, when somebody wants the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu import edit
from pagoda.backends.jax_tpu.batch import Plans
from pagoda.backends.jax_tpu.catalogue import Choose, OnLogits, Remember
from pagoda.backends.jax_tpu.choose import Kind
from pagoda.backends.jax_tpu.logprobs import BEST, sorted_logprobs
from pagoda.backends.jax_tpu.programs import Programs
from pagoda.backends.jax_tpu.rows import Columns, RowState, RowTable
from pagoda.common.engine.sampling import LogprobsMode, noise_keys
from pagoda.common.engine.step import Int32, RowStart, TokenLogprobs


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


class Sampler:
    """Chooses one token per sampling row. `history` int32 [rows+1, max_len+1] lives on the device."""

    def __init__(self, programs: Programs, max_rows: int) -> None:
        shape = programs.catalogue.history
        self.history = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
        self.rows = RowTable(max_rows)
        self.vocab, self.mode = programs.catalogue.model.spec.vocab, programs.catalogue.mode
        self._shards = programs.catalogue.model.shards
        self._programs = programs

    def start(self, start: RowStart) -> None:
        """A row begins anew. Its tokens go to the device only if its rules look at them there."""
        self.rows.start(start, self.vocab)
        if start.rules.has_penalties or any(len(word) > 1 for word in start.rules.bad_words):
            tokens = np.zeros(self.history.shape[1], np.int32)
            tokens[: len(start.token_ids)] = start.token_ids
            self.history = self._programs[Remember()](self.history, np.int32(start.row), tokens)

    def sample(self, logits: jax.Array, plans: Plans) -> Sampled:
        """Logits float32 [R, V] of the sequences of every shard's plan and padding -> the tokens of those that sample.

        Each shard has as many of the R rows.
        """
        seqs = logits.shape[0] // self._shards
        chosen = Chosen.of(plans, seqs, self.rows)
        edited = self._edit(logits, chosen)
        kind, rules = _rules(chosen, logits.shape[0], len(self.rows))
        tokens, self.history, drawn = self._programs[Choose(seqs, kind)](edited, self.history, rules)
        tokens.copy_to_host_async()
        wanted = {index: self.rows[row].rules.logprobs or 0 for index, row, _ in chosen.where("shown")}
        if not wanted:
            return Sampled(tokens, self.mode, wanted)
        shown = logits if drawn is None else drawn
        scored = self._programs[OnLogits("logprobs", seqs)](shown, tokens)
        many = any(not 0 <= best <= BEST for best in wanted.values())
        return Sampled(tokens, self.mode, wanted, scored, shown if many else None)

    def _edit(self, logits: jax.Array, chosen: Chosen) -> jax.Array:
        """Logits after penalties, bias and bans."""
        total, programs, rows = logits.shape[0], self._programs, self.rows
        seqs = total // self._shards
        if penalised := chosen.where("penalised"):
            columns = _penalties([(*place, rows[place[1]]) for place in penalised], total)
            logits = programs[OnLogits("penalise", seqs)](logits, self.history, columns)
        if edited := [(*place, rows[place[1]]) for place in chosen.where("edited")]:
            for entries in _pieces(_additions(edited), edit.ENTRIES):
                logits = programs[OnLogits("adjust", seqs)](logits, _entries(entries, total))
            for words in _word_pieces(_words(edited)):
                logits = programs[OnLogits("ban_words", seqs)](logits, self.history, *_word_arrays(words, total))
        if masked := chosen.where("masked"):
            allowed = {index: rows[row].rules.allowed_token_ids or () for index, row, _ in masked}
            logits = programs[OnLogits("mask", seqs)](logits, _allowed(allowed, total, logits.shape[1]))
        return logits


@dataclass(frozen=True, slots=True)
class Chosen:
    """The sequences that sample: their places in the logits, their rows, the tokens known of each, their columns."""

    indices: npt.NDArray[np.intp]
    rows: Int32
    ends: Int32
    columns: Columns

    @classmethod
    def of(cls, plans: Plans, seqs: int, table: RowTable) -> Chosen:
        """Those of every shard's plan. `seqs`: rows of the logits per shard."""
        parts = [(shard * seqs, plan, np.flatnonzero(plan.samples)) for shard, plan in plans.items()]
        indices = np.concatenate([first + at for first, _, at in parts])
        rows = np.concatenate([plan.rows[at] for _, plan, at in parts])
        ends = np.concatenate([(plan.context + np.diff(plan.query_start))[at] for _, plan, at in parts])
        return cls(indices, rows, ends, table.columns[rows])

    def where(self, field: str) -> list[tuple[int, int, int]]:
        """(number, row, tokens known) of those with that field."""
        at = np.flatnonzero(self.columns[field])
        return list(zip(self.indices[at].tolist(), self.rows[at].tolist(), self.ends[at].tolist()))


Place = tuple[int, int, int, RowState]
"""Number in the step, row, tokens known, state."""


def _rules(chosen: Chosen, seqs: int, empty_row: int) -> tuple[Kind, Int32]:
    """What choosing must do, and int32 [7, R] for `choose.Rules`; who does not sample uses the spare row."""
    packed = np.zeros((7, seqs), np.int32)
    packed[0] = empty_row
    at, columns = chosen.indices, chosen.columns
    packed[0, at], packed[1, at] = chosen.rows, chosen.ends
    if not columns["random"].any():
        return "greedy", packed
    packed[2, at] = noise_keys(columns["seed"], chosen.ends.astype(np.int64)).view(np.int32)
    packed[4, at] = columns["top_k"]
    real = packed.view(np.float32)
    for field, name in ((3, "temperature"), (5, "top_p"), (6, "min_p")):
        real[field, at] = columns[name]
    return "filtered" if columns["filtered"].any() else "random", packed


Entry = tuple[int, int, float]
"""Sequence, token, value to add."""


def _penalties(places: list[Place], seqs: int) -> Int32:
    """int32 [8, R] as `edit.penalise` reads it."""
    packed = np.zeros((8, seqs), np.int32)
    real = packed.view(np.float32)
    for column, (index, row, end, state) in enumerate(places):
        rules = state.rules
        packed[:4, column] = index, row, len(state.prompt), end
        real[4:7, column] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    packed[7, 0] = len(places)
    return packed


def _additions(places: list[Place]) -> Iterator[Entry]:
    """Bias, words of one token, and stops that come too early."""
    for index, _, end, state in places:
        rules = state.rules
        yield from ((index, token, value) for token, value in rules.logit_bias)
        yield from ((index, word[0], -np.inf) for word in rules.bad_words if len(word) == 1)
        if end - len(state.prompt) < rules.min_tokens:
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


def _words(places: list[Place]) -> Iterator[_Word]:
    for index, row, end, state in places:
        for word in state.rules.bad_words:
            if 1 < len(word) <= end - len(state.prompt) + 1:
                head = word[:-1][-edit.HEADS :]
                yield _Word(index, row, end - len(head), head, word[-1])


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


def _allowed(tokens: dict[int, tuple[int, ...]], seqs: int, vocab: int) -> npt.NDArray[np.uint32]:
    """uint32 [R, ceil(V/32)] as `edit.mask` reads it, from the tokens that some sequences allow."""
    bits = np.full((seqs, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, allowed in tokens.items():
        ids = np.asarray(allowed, np.int64)
        bits[index] = 0
        np.bitwise_or.at(bits[index], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits
