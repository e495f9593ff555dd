"""Prompt lookup: the drafts are what followed the newest earlier occurrence of a sequence's last tokens.

Answers that quote their prompt are guessed so: edits of code or text, extraction, summaries. A prompt is indexed when
the sequence first may have drafts, each token of the answer once it is known.

Source of the method: A. Saxena, Prompt Lookup Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.common.engine.speculative.proposer import DraftContext, Proposer
from pagoda.common.engine.speculative.token_index import TokenIndex, hashes_of
from pagoda.common.engine.step import EMBEDDED


class NgramProposer(Proposer):
    """Looks up the last `shortest` to `longest` tokens of each sequence in its own prompt and output.

    Of the occurrences found, the longest match is taken, among equals the newest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest, self._lengths = shortest, longest, (shortest,)
        self._texts: dict[str, TokenIndex] = {}

    @property
    def name(self) -> str:
        return "ngram"

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Sequence[int]]:
        return [self._continue(context) for context in contexts]

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        self._texts.pop(request_id, None)

    def _continue(self, context: DraftContext) -> Sequence[int]:
        text = self._texts.get(context.request_id)
        if text is None:
            text = self._texts[context.request_id] = TokenIndex(self._lengths, context.prompt)
        known = len(text) - len(context.prompt)
        if known < len(context.outputs):
            text.extend(context.outputs[known:])
        tail = text.tokens[-self._longest :]
        if context.drafts:
            tail.extend(context.drafts)
        best = best_end = 0
        for hash in hashes_of(tail, self._lengths):
            for end in text.ends_of(tail, 0, hash):
                length = text.match_length(end, tail, self._shortest, self._longest)
                if length > best:
                    best, best_end = length, end
                if length == self._longest:
                    break
        return continuation(text, best_end, context.drafts, context.num_tokens) if best else ()


def continuation(text: TokenIndex, end: int, drafts: Sequence[int], most: int) -> list[int]:
    """Return the tokens from index `end` of the text on, at most `most`, and none from an EMBEDDED one on.

    After the text come `drafts`, then the returned tokens themselves: a loop goes on.
    """
    tokens = text.tokens[end : end + most].tolist()
    if EMBEDDED in tokens:
        return tokens[: tokens.index(EMBEDDED)]
    if len(tokens) < most:
        following, first = [*drafts, *tokens], len(text) - end
        while len(tokens) < most:
            tokens.append(following[len(tokens) - first])
            following.append(tokens[-1])
    return tokens
