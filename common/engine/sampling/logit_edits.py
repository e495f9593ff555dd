"""What a request adds to its logits, compiled to arrays once: for all of its sequences, and for all of their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import Float32, Int32, UInt32

MAX_LISTED: Final = 1024
"""Biased and banned tokens of a request up to which they are added one by one; a longer list is one array [V]."""

MAX_WORD_HEADS: Final = 1024
"""Of a banned word with more tokens before its last one, only the last MAX_WORD_HEADS are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class BannedWords:
    """The w banned words of several tokens. Word i is banned after its head, heads[first[i] : first[i + 1]]."""

    lasts: Int32  # [w] the last token
    lengths: Int32  # [w] tokens in all
    first: Int32  # [w + 1]
    heads: Int32  # [h] the tokens before the last one, of one word after the other

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> Self:
        """Return the words that have several tokens."""
        several = [word for word in words if len(word) > 1]
        heads = [word[:-1][-MAX_WORD_HEADS:] for word in several]
        return cls(
            lasts=np.array([word[-1] for word in several], np.int32),
            lengths=np.array([len(word) for word in several], np.int32),
            first=np.concatenate([[0], np.cumsum([len(head) for head in heads])]).astype(np.int32),
            heads=np.array([token for head in heads for token in head], np.int32),
        )

    @property
    def counts(self) -> Int32:
        """Tokens of each head [w]."""
        counts: Int32 = np.diff(self.first)
        return counts


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LogitEdits:
    """logit_bias, bad_words, allowed_token_ids and the stop ids that min_tokens masks."""

    tokens: Int32  # [n] biased tokens, then banned words of one token; empty with `dense`
    values: Float32  # [n] what is added to their logits
    dense: Float32 | None  # [V] what is added to all logits: the same, of long lists
    stops: Int32  # stop ids, masked until min_tokens
    words: BannedWords | None
    allowed: UInt32 | None  # [ceil(V/32)], see `allowed_bits`
    lists: tuple[object, ...] = ()  # lists of the rules it was compiled from, kept so that their ids are not reused

    @classmethod
    def of(cls, rules: SamplingRules, vocab: int) -> Self:
        """Compile the lists of a request."""
        single = [word[0] for word in rules.bad_words if len(word) == 1]
        biased = np.array([token for token, _ in rules.logit_bias], np.int32)
        tokens = np.concatenate([biased, np.array(single, np.int32)])
        values = np.full(len(tokens), -np.inf, np.float32)
        values[: len(biased)] = [value for _, value in rules.logit_bias]
        dense: Float32 | None = None
        if len(tokens) > MAX_LISTED:
            dense = np.zeros(vocab, np.float32)
            np.add.at(dense, tokens, values)
            tokens = tokens[:0]
            values = values[:0]
        allowed = rules.allowed_token_ids
        return cls(
            tokens=tokens,
            values=values,
            dense=dense,
            stops=np.array(rules.stop_ids if rules.min_tokens else (), np.int32),
            words=BannedWords.of(rules.bad_words) if len(single) < len(rules.bad_words) else None,
            allowed=None if allowed is None else allowed_bits({0: allowed}, 1, vocab)[0],
            lists=_lists(rules),
        )


class EditsTable:
    """The edits of the requests in an engine: sequences with the same lists share theirs."""

    def __init__(self) -> None:
        self._edits: WeakValueDictionary[tuple[int, ...], LogitEdits] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._edits)

    def edits(self, rules: SamplingRules, vocab: int) -> LogitEdits:
        """Return the edits of a sequence, whose lists are the same objects in all sequences of a request."""
        lists = _lists(rules)
        key = (rules.min_tokens, *map(id, lists))
        if (edits := self._edits.get(key)) is None:
            edits = self._edits[key] = LogitEdits.of(rules, vocab)
        return edits


def _lists(rules: SamplingRules) -> tuple[Any, ...]:
    return rules.logit_bias, rules.bad_words, rules.stop_ids, rules.allowed_token_ids


def allowed_bits(tokens: Mapping[int, Sequence[int]], seqs: int, vocab: int) -> npt.NDArray[np.uint32]:
    """Return uint32 [seqs, ceil(V/32)], token t being bit t % 32 of word t // 32; rows not in `tokens` allow all."""
    bits = np.full((seqs, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, ids in tokens.items():
        token_ids = np.asarray(ids, np.int64)
        bits[index] = 0
        np.bitwise_or.at(bits[index], token_ids // 32, np.uint32(1) << (token_ids % 32).astype(np.uint32))
    return bits


NO_EDITS: Final = LogitEdits.of(SamplingRules(), 1)
