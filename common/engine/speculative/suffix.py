"""Suffix decoding: drafts by how often tokens followed a sequence's last tokens, in its own text and in past answers.

Source: G. Oliaro et al., SuffixDecoding (2024). The paper keeps suffix trees with counts; here the occurrences of a
suffix are listed from hash chains, the newest ones, and counted when they are needed. That takes a fraction of a tree's
memory, and gives the same counts as far as the lists are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from pagoda.common.engine.speculative.proposer import DraftContext, Proposer
from pagoda.common.engine.speculative.token_index import TokenIndex, hashes_of
from pagoda.common.engine.steps.contract import EMBEDDED

LENGTHS: Final = (2, 4, 8)
"""Suffixes that are looked up, the longest first; a shorter one only if no longer one has occurred."""

_OCCURRENCES: Final = 16
"""Occurrences of a suffix that are counted, at most: the newest."""

_MAX_TOKENS: Final = 1 << 20
"""Tokens of past answers, at most."""

SEPARATOR: Final = EMBEDDED
"""Stands after each past answer; no n-gram with it is found, and no proposal goes beyond it."""


class _Proposal(NamedTuple):
    tokens: list[int]
    score: float  # expected number of accepted tokens


_NOTHING: Final = _Proposal([], 0.0)


class SuffixProposer(Proposer):
    """Proposes the most frequent continuation of the longest suffix that occurred before.

    `max_depth`: tokens of a suffix and its continuation together, at most. `max_answers`: past answers that are kept.
    `factor`: proposed tokens, at most, per token of the suffix. `min_prob`: the least estimated probability with which
    all tokens up to a proposed one are right.
    """

    def __init__(self, max_depth: int, max_answers: int, factor: float, min_prob: float) -> None:
        self._max_depth = max_depth
        self._factor = factor
        self._min_prob = min_prob
        self._texts: dict[str, TokenIndex] = {}
        self._past = PastAnswers(max_answers, _MAX_TOKENS)

    @property
    def name(self) -> str:
        return "suffix"

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Sequence[int]]:
        return [self._continue(context) for context in contexts]

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        self._texts.pop(request_id, None)
        self._past.add(outputs)

    def _continue(self, context: DraftContext) -> list[int]:
        text = self._texts.get(context.request_id)
        if text is None:
            text = self._texts[context.request_id] = TokenIndex(LENGTHS, context.prompt)
        num_outputs = len(text) - len(context.prompt)
        if num_outputs < len(context.outputs):
            text.extend(context.outputs[num_outputs:])
        tail = text.tokens[-self._max_depth :].tolist()
        tail.extend(context.drafts)
        hashes = hashes_of(tail, LENGTHS)
        best = _NOTHING
        for searched in (text, *self._past.parts):
            proposal = self._best(searched, tail, hashes, context.num_tokens)
            if proposal.score > best.score:
                best = proposal
        return best.tokens

    def _best(self, text: TokenIndex, tail: Sequence[int], hashes: Sequence[int], most: int) -> _Proposal:
        """Return the continuation of `tail` with the highest score, over the lengths of the suffix that is matched."""
        for index in range(len(hashes) - 1, -1, -1):
            ends = list(islice(text.ends_of(tail, index, hashes[index]), _OCCURRENCES))
            if ends:
                return self._of_occurrences(text, ends, LENGTHS[index], tail, most)
        return _NOTHING

    def _of_occurrences(
        self, text: TokenIndex, ends: list[int], least: int, tail: Sequence[int], most: int
    ) -> _Proposal:
        """Return the best proposal of the occurrences of `least` tokens: of all, or of those that match more."""
        matched = [(text.match_length(end, tail, least, self._max_depth - 1), end) for end in ends]
        best = _NOTHING
        for length in sorted({length for length, _ in matched}, reverse=True):
            room = min(most, int(self._factor * length), self._max_depth - length)
            if room > best.score:
                candidates = [end for match_length, end in matched if match_length >= length]
                best = max(best, self._likeliest(text, candidates, room), key=_score)
        return best

    def _likeliest(self, text: TokenIndex, ends: list[int], most: int) -> _Proposal:
        """Return the likeliest path from `ends`, whose tokens are each the most frequent one after those before."""
        tokens = text.tokens
        score = 0.0
        prob = 1.0
        path: list[int] = []
        while len(path) < most:
            depth = len(path)
            if len(ends) == 1:  # one occurrence is left: its tokens follow with certainty
                more = tokens[ends[0] + depth : ends[0] + most].tolist()
                if SEPARATOR in more:
                    del more[more.index(SEPARATOR) :]
                return _Proposal(path + more, score + prob * len(more))
            following = [tokens[end + depth] for end in ends if end + depth < len(tokens)]
            if not following:
                break
            counts: dict[int, int] = {}
            for token in following:
                counts[token] = counts.get(token, 0) + 1
            token = max(counts, key=counts.__getitem__)  # the newest among equals: `ends` are newest first
            prob *= counts[token] / len(following)
            if token == SEPARATOR or prob < self._min_prob:
                break
            path.append(token)
            score += prob
            ends = [end for end in ends if end + depth < len(tokens) and tokens[end + depth] == token]
        return _Proposal(path, score)


def _score(proposal: _Proposal) -> float:
    return proposal.score


class PastAnswers:
    """The newest answers of all requests, in two indexes: once the newer is full, it replaces the older.

    So between half of the allowed answers, or tokens, and all of them are kept.
    """

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        num_parts = min(2, max_answers)
        self._parts: deque[TokenIndex] = deque(maxlen=num_parts)
        self._max_answers = max_answers // num_parts if num_parts else 0  # answers of a part, at most
        self._max_tokens = max_tokens // num_parts if num_parts else 0
        self._answers = 0  # answers in the newest part

    @property
    def parts(self) -> Iterable[TokenIndex]:
        """The indexes, the newest first."""
        return self._parts

    def add(self, outputs: Sequence[int]) -> None:
        """Add an answer."""
        if not self._max_answers or not outputs:
            return
        added = [*outputs[: self._max_tokens - 1], SEPARATOR]
        if not self._parts or self._answers == self._max_answers or len(self._parts[0]) + len(added) > self._max_tokens:
            self._parts.appendleft(TokenIndex(LENGTHS))
            self._answers = 0
        self._parts[0].extend(added)
        self._answers += 1
