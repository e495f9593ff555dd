"""Logit edits before temperature, packed into arrays that every backend's sampler reads.

Bias and bans go into arrays of fixed size, so that no device program depends on how much a request specifies. Lists
that exceed an array are split over several.
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
"""Tokens before the last one of those words, in total. Of a longer word only the last HEADS are compared."""

Entry = tuple[int, int, float]
"""Row of logits, token, value to add."""


def penalties(rows: Sequence[SampledRow], seqs: int) -> Int32:
    """Return the penalised rows as columns of int32 [8, seqs].

    Row of logits, row of the history, prompt length, known tokens, then repetition, frequency and presence penalty as
    bits of float32; [7, 0] is the number of columns in use.
    """
    packed = np.zeros((8, seqs), np.int32)
    real = packed.view(np.float32)
    for column, sampled in enumerate(rows):
        rules = sampled.state.rules
        packed[:4, column] = sampled.index, sampled.row, len(sampled.state.prompt), sampled.known
        real[4:7, column] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    packed[7, 0] = len(rows)
    return packed


def additions(rows: Sequence[SampledRow], seqs: int) -> Iterator[Int32]:
    """Yield int32 [3, ENTRIES]: row of logits (`seqs`: padding), token, and the value added to its logit, as bits.

    Bias, banned words of one token, and stop ids that min_tokens masks.
    """
    entries = [entry for sampled in rows for entry in _entries(sampled)]
    for at in range(0, len(entries), ENTRIES):
        piece = entries[at : at + ENTRIES]
        packed = np.zeros((3, ENTRIES), np.int32)
        packed[0] = seqs
        sequences, tokens, values = zip(*piece)
        packed[0, : len(piece)], packed[1, : len(piece)] = sequences, tokens
        packed.view(np.float32)[2, : len(piece)] = values
        yield packed


def _entries(sampled: SampledRow) -> Iterator[Entry]:
    rules = sampled.state.rules
    yield from ((sampled.index, token, value) for token, value in rules.logit_bias)
    yield from ((sampled.index, word[0], -np.inf) for word in rules.bad_words if len(word) == 1)
    if sampled.generated < rules.min_tokens:
        yield from ((sampled.index, token, -np.inf) for token in rules.stop_ids)


@dataclass(frozen=True, slots=True)
class _Word:
    """A banned word of several tokens. `last` is banned if the history of `row` has `head` from `begin` on."""

    index: int  # row of logits
    row: int
    begin: int
    head: tuple[int, ...]
    last: int


def banned_words(rows: Sequence[SampledRow], seqs: int) -> Iterator[tuple[Int32, Int32]]:
    """Yield words int32 [2, WORDS] with their heads int32 [4, HEADS].

    A word is a row of logits (`seqs`: padding) and its last token. A head is one token before the last: its word
    (WORDS: padding), the row and position of the history to compare with, and the token.
    """
    for piece in _word_pieces(word for sampled in rows for word in _words(sampled)):
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


def _words(sampled: SampledRow) -> Iterator[_Word]:
    for word in sampled.state.rules.bad_words:
        if 1 < len(word) <= sampled.generated + 1:
            head = word[:-1][-HEADS:]
            yield _Word(sampled.index, sampled.row, sampled.known - len(head), head, word[-1])


def _word_pieces(words: Iterator[_Word]) -> Iterator[list[_Word]]:
    """Split the words into lists that fit the arrays."""
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


def allowed(rows: Sequence[SampledRow], masks: Mapping[int, UInt32], vocab: int) -> dict[int, UInt32]:
    """Return row of logits -> uint32 [ceil(V/32)], the tokens that both its rules and its grammar allow.

    `rows`: those with allowed_token_ids. `masks`: grammar masks by row of logits.
    """
    rules = {number: sampled.state.rules.allowed_token_ids or () for number, sampled in enumerate(rows)}
    allowed_by_rules = zip((sampled.index for sampled in rows), allowed_bits(rules, len(rows), vocab))
    both = dict(allowed_by_rules)
    for index, bits in masks.items():
        both[index] = bits & both[index] if index in both else bits
    return both


def grammar_masks(plans: Mapping[int, StepPlan], seqs: int) -> dict[int, UInt32]:
    """Return the masks of every shard's plan by row of logits. `seqs`: rows of logits per shard."""
    return {
        shard * seqs + sequence: bits
        for shard, plan in plans.items()
        if plan.masks is not None
        for sequence, bits in zip(plan.masks.sequences.tolist(), plan.masks.bits)
    }


def allowed_bits(tokens: Mapping[int, Sequence[int]], seqs: int, vocab: int) -> npt.NDArray[np.uint32]:
    """Return uint32 [seqs, ceil(V/32)], token t being bit t % 32 of word t // 32; rows not in `tokens` allow all."""
    bits = np.full((seqs, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, ids in tokens.items():
        token_ids = np.asarray(ids, np.int64)
        bits[index] = 0
        np.bitwise_or.at(bits[index], token_ids // 32, np.uint32(1) << (token_ids % 32).astype(np.uint32))
    return bits
