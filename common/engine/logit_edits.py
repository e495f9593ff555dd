"""What a step's rows do to their logits before temperature, packed for a device that edits them there.

Bias and bans go in arrays of one size, so that no device program depends on how much a request asks for; lists that
outgrow an array go in several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling_state import SampledRow
from pagoda.common.engine.step import Int32, StepPlan, UInt32

ENTRIES: Final = 256
"""(sequence, token, value) triples per array of additions."""

WORDS: Final = 128
"""Banned words of several tokens per array."""

HEADS: Final = 1024
"""Tokens before the last of those words, all together. A longer word is known by its last so many tokens."""

Entry = tuple[int, int, float]
"""Sequence, token, value to add."""


def penalties(places: Sequence[SampledRow], seqs: int) -> Int32:
    """int32 [8, R], a column per penalised sequence.

    Its number in the logits, its row of the history, prompt length, tokens known, then repetition, frequency and
    presence penalty as float bits; [7, 0]: how many columns.
    """
    packed = np.zeros((8, seqs), np.int32)
    real = packed.view(np.float32)
    for column, place in enumerate(places):
        rules = place.state.rules
        packed[:4, column] = place.index, place.row, len(place.state.prompt), place.known
        real[4:7, column] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    packed[7, 0] = len(places)
    return packed


def additions(places: Sequence[SampledRow], seqs: int) -> Iterator[Int32]:
    """int32 [3, ENTRIES] each: sequence (beyond R: padding), token, float bits of what is added to its logit.

    Bias, words of one token, and stops that come too early.
    """
    entries = [entry for place in places for entry in _entries(place)]
    for at in range(0, len(entries), ENTRIES):
        piece = entries[at : at + ENTRIES]
        packed = np.zeros((3, ENTRIES), np.int32)
        packed[0] = seqs
        sequences, tokens, values = zip(*piece)
        packed[0, : len(piece)], packed[1, : len(piece)] = sequences, tokens
        packed.view(np.float32)[2, : len(piece)] = values
        yield packed


def _entries(place: SampledRow) -> Iterator[Entry]:
    rules = place.state.rules
    yield from ((place.index, token, value) for token, value in rules.logit_bias)
    yield from ((place.index, word[0], -np.inf) for word in rules.bad_words if len(word) == 1)
    if place.generated < rules.min_tokens:
        yield from ((place.index, token, -np.inf) for token in rules.stop_ids)


@dataclass(frozen=True, slots=True)
class _Word:
    """A banned word of several tokens; `head` stands from `begin` on in `row` of the history if it is about to come."""

    index: int
    row: int
    begin: int
    head: tuple[int, ...]
    last: int


def banned_words(places: Sequence[SampledRow], seqs: int) -> Iterator[tuple[Int32, Int32]]:
    """Words int32 [2, WORDS] and heads int32 [4, HEADS] each.

    A word: sequence (beyond R: padding), last token. A column of heads is a token before: its word (beyond WORDS:
    padding), the row and position of the history it is compared with, and the token.
    """
    for piece in _word_pieces(word for place in places for word in _words(place)):
        words, heads = np.zeros((2, WORDS), np.int32), np.zeros((4, HEADS), np.int32)
        words[0], heads[0] = seqs, WORDS
        at = 0
        for number, word in enumerate(piece):
            words[:, number] = word.index, word.last
            part = heads[:, at : at + len(word.head)]
            part[0], part[1] = number, word.row
            part[2], part[3] = word.begin + np.arange(len(word.head)), word.head
            at += len(word.head)
        yield words, heads


def _words(place: SampledRow) -> Iterator[_Word]:
    for word in place.state.rules.bad_words:
        if 1 < len(word) <= place.generated + 1:
            head = word[:-1][-HEADS:]
            yield _Word(place.index, place.row, place.known - len(head), head, word[-1])


def _word_pieces(words: Iterator[_Word]) -> Iterator[list[_Word]]:
    """The words in lists that fit the arrays."""
    piece: list[_Word] = []
    tokens = 0
    for word in words:
        if len(piece) == WORDS or tokens + len(word.head) > HEADS:
            yield piece
            piece, tokens = [], 0
        piece.append(word)
        tokens += len(word.head)
    if piece:
        yield piece


def allowed(places: Sequence[SampledRow], plans: Mapping[int, StepPlan], seqs: int, vocab: int) -> dict[int, UInt32]:
    """Sequence in the logits -> uint32 [ceil(V/32)], what it may sample by its rules and by its plan's mask.

    `places`: those whose rules allow some tokens only. `plans`: by shard, each with `seqs` rows of logits.
    """
    rules = {at: place.state.rules.allowed_token_ids or () for at, place in enumerate(places)}
    found = dict(zip((place.index for place in places), allowed_bits(rules, len(places), vocab)))
    for shard, plan in plans.items():
        if plan.masks is not None:
            for sequence, bits in zip(plan.masks.sequences.tolist(), plan.masks.bits):
                index = shard * seqs + sequence
                found[index] = bits & found[index] if index in found else bits
    return found


def allowed_bits(tokens: Mapping[int, Sequence[int]], seqs: int, vocab: int) -> npt.NDArray[np.uint32]:
    """uint32 [R, ceil(V/32)], token t being bit t % 32 of word t // 32; sequences that are not named allow all."""
    bits = np.full((seqs, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, allowed in tokens.items():
        ids = np.asarray(allowed, np.int64)
        bits[index] = 0
        np.bitwise_or.at(bits[index], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits
