"""Prompt lookup: the drafts are what followed the newest earlier occurrence of a sequence's last tokens.

Answers that quote their prompt are guessed so: edits of code or text, extraction, summaries. A prompt is indexed when
the sequence first may have drafts, each token of the answer once it is known.

Source of the method: A. Saxena, Prompt Lookup Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from operator import getitem

import numpy as np

from pagoda.common.engine.speculative.ngram_table import Index, NgramTable, spread
from pagoda.common.engine.speculative.proposer import DraftContext, PaddedGuesses, Proposer
from pagoda.common.engine.steps.contract import EMBEDDED, Int32


class NgramProposer(Proposer):
    """Looks up the last `shortest` to `longest` tokens of each sequence in its own prompt and output.

    Of the occurrences found, the longest match is taken, among equals the newest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._table = NgramTable(shortest, longest)
        self._texts: dict[str, int] = {}  # request id -> number in the table

    @property
    def name(self) -> str:
        return "ngram"

    def propose(self, contexts: Sequence[DraftContext]) -> PaddedGuesses:
        request_ids, prompts, outputs, drafts, wanted = zip(*contexts)
        table = self._table
        numbers = self._numbers(request_ids, prompts)
        known_outputs = table.lengths(numbers) - _sizes(prompts)
        new_counts, new_tokens = _from(outputs, known_outputs)
        table.extend(numbers, counts=new_counts, tokens=new_tokens)
        draft_counts, draft_tokens = _from(drafts, np.zeros_like(known_outputs))
        lengths = table.write_drafts(numbers, counts=draft_counts, tokens=draft_tokens)
        ends = table.find(numbers, lengths)
        guesses = table.continuations(numbers, ends, lengths, max(wanted))
        counts = np.minimum(np.logical_and.accumulate(guesses != EMBEDDED, axis=1).sum(1), wanted)
        counts[ends == 0] = 0
        return PaddedGuesses(guesses, counts)

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        if (number := self._texts.pop(request_id, None)) is not None:
            self._table.remove(number)

    def _numbers(self, request_ids: Sequence[str], prompts: Sequence[Int32]) -> Index:
        """Return the number of each text [n]; prompts of new requests are added."""
        for request_id, prompt in zip(request_ids, prompts):
            if request_id not in self._texts:
                self._texts[request_id] = self._table.add(prompt)
        return np.fromiter(map(self._texts.__getitem__, request_ids), np.int64, len(request_ids))


def _sizes(values: Sequence[Sized]) -> Index:
    return np.fromiter(map(len, values), np.int64, len(values))


def _from(values: Sequence[Sequence[int]], starts: Index) -> tuple[Index, Int32]:
    """Return how many tokens each sequence has from `starts` [n] on, and these, one after another."""
    counts = _sizes(values) - starts
    owners, offsets = spread(counts)
    positions = (starts[owners] + offsets).tolist()
    tokens = map(getitem, map(values.__getitem__, owners.tolist()), positions)  # slices would take four times as long
    return counts, np.fromiter(tokens, np.int32, len(positions))
