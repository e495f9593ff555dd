"""Proposers: who guesses the next tokens of a sequence. The model checks the guesses (drafts) in one step.

A draft is accepted if it equals the token that is sampled in its place. A wrong one costs time and changes no token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.common.config.engine import Limits
from pagoda.common.engine.messages import DraftStats
from pagoda.common.engine.scheduling.request import RunningBatch
from pagoda.common.engine.speculative.draft_lengths import DraftCounts, DraftLengths, LengthsState
from pagoda.common.engine.steps.contract import Int32

logger = logging.getLogger(__name__)


class DraftContext(NamedTuple):
    """A sequence whose next tokens are to be guessed: prompt, outputs, drafts, in this order."""

    request_id: str
    prompt: Int32  # token ids; EMBEDDED at positions that have an embedding
    outputs: Sequence[int]  # the generated tokens that are known; the engine's list: neither keep nor change it
    drafts: Sequence[int]  # the guesses in flight, taken as right
    num_tokens: int  # guess at most this many tokens


class PaddedGuesses(NamedTuple):
    """The guesses of n sequences as arrays, which cost less than lists where there are many."""

    tokens: Int32  # [n, the largest num_tokens]
    counts: npt.NDArray[np.int64]  # [n] of each row the first ones


class Proposer(Protocol):
    """Guesses tokens on the host, between two steps."""

    @property
    def name(self) -> str:
        """The name in log messages."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Sequence[int]] | PaddedGuesses:
        """Return the token ids that follow each of n > 0 contexts, at most `num_tokens`; none where it has no guess."""
        ...

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        """Forget a request that has ended; `outputs`: all that it generated. It may never have been proposed for."""
        ...


class AssumedProposer:
    """Proposes as many drafts as may be, whichever: for simulations, in which acceptance is assumed."""

    name = "assumed"

    def propose(self, contexts: Sequence[DraftContext]) -> PaddedGuesses:
        counts = np.array([context.num_tokens for context in contexts], np.int64)
        return PaddedGuesses(np.zeros((len(contexts), counts.max()), np.int32), counts)

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class PlannerState:
    """The state of a DraftPlanner but for a proposer's tables, which follow from the tokens of requests."""

    active: bool
    lengths: LengthsState | None


class DraftPlanner:
    """How many drafts each sequence has, and what became of them.

    `plans_ahead`: False plans no step while one with drafts runs.
    """

    def __init__(self, lengths: DraftLengths | None = None, plans_ahead: bool = True) -> None:
        """`lengths`: how many drafts pay; None: all that there is room for."""
        self.active = True
        self.plans_ahead = plans_ahead
        self._lengths = lengths
        self._counts = DraftCounts()

    def propose(self, batch: RunningBatch, rows: Int32, limits: Limits) -> None:
        """Set the drafts of the next step in the batch: of `rows`, all that run. Other rows have none."""
        raise NotImplementedError

    def report(self, batch: RunningBatch, rows: Int32, drafts: Int32, accepted: Int32) -> None:
        """Take note that of the `drafts` [n] of `rows` [n] the first `accepted` [n] were right."""
        rows, drafts, accepted = rows[drafts > 0], drafts[drafts > 0], accepted[drafts > 0]
        self._counts.add(drafts, accepted)
        if self._lengths is not None:
            self._lengths.report(batch, rows, drafts, accepted)

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        """Forget a request that has ended, with all the `outputs` that it generated."""

    def stats(self) -> DraftStats:
        """Return the counters since the start."""
        return self._counts.stats()

    def state(self) -> PlannerState:
        """Return a copy of the state."""
        return PlannerState(self.active, None if self._lengths is None else self._lengths.copy_state())

    def restore(self, state: PlannerState) -> None:
        """Replace the state."""
        self.active = state.active
        if self._lengths is not None and state.lengths is not None:
            self._lengths.restore(state.lengths)


class Drafter(DraftPlanner):
    """Asks a proposer until it returns a token id outside the vocabulary; from then on there are no drafts."""

    def __init__(
        self, proposer: Proposer, vocab: int, lengths: DraftLengths | None = None, plans_ahead: bool = True
    ) -> None:
        """`plans_ahead`: False where the proposer should know the tokens of a step with drafts first."""
        super().__init__(lengths, plans_ahead)
        self._proposer = proposer
        self._vocab = vocab

    def propose(self, batch: RunningBatch, rows: Int32, limits: Limits) -> None:
        """Set the drafts of the next step in the batch: of `rows`, all that run. Other rows have none."""
        room = self._room(batch, rows, limits)
        rows = rows[room > 0]
        room = room[room > 0]
        inflight = batch.inflight[rows] > 0
        contexts = draft_contexts(batch, rows, room + inflight)
        batch.num_drafts[:] = 0
        if contexts:
            ids, counts = self.guess(contexts, limits.max_drafts + 1)
            # The first guess of a row in flight is for the token that the step in flight samples.
            batch.drafts[rows] = np.where(inflight[:, None], ids[:, 1:], ids[:, :-1])
            batch.num_drafts[rows] = np.maximum(counts - inflight, 0)
            self._counts.steps["drafted" if batch.num_drafts.any() else "no_match"] += 1

    def _room(self, batch: RunningBatch, rows: Int32, limits: Limits) -> Int32:
        """Return how many drafts each of `rows` may have: those that there is room for, and that pay."""
        room = draft_room(batch, rows, limits)
        if self._lengths is None or not room.any():
            return room
        paying = np.minimum(room, self._lengths.paying(batch, rows, limits.max_drafts))
        if not paying.any():
            self._counts.steps[self._lengths.state(len(rows))] += 1
        return paying

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        """Forget a request that has ended, with all the `outputs` that it generated."""
        self._proposer.finish(request_id, outputs)

    def guess(self, contexts: Sequence[DraftContext], width: int) -> tuple[Int32, Int32]:
        """Return the guessed tokens int32 [n, width] of n contexts, row by row, and the number [n] of each.

        `width`: the largest `num_tokens`. Logs an error and returns no guesses if a token id is invalid.
        """
        proposed = self._proposer.propose(contexts)
        tokens: Int32 | list[int]
        if isinstance(proposed, PaddedGuesses):
            counts = proposed.counts.astype(np.int32)
            places = np.arange(proposed.tokens.shape[1])
            tokens = proposed.tokens[places < counts[:, None]]
            least = tokens.min(initial=0)
            most = tokens.max(initial=0)
        else:
            proposals = [ids[: context.num_tokens] for ids, context in zip(proposed, contexts)]
            counts = np.fromiter(map(len, proposals), np.int32, len(contexts))
            tokens = list(chain.from_iterable(proposals))
            least = min(tokens, default=0)
            most = max(tokens, default=0)
        padded = np.zeros((len(contexts), width), np.int32)
        if not 0 <= least <= most < self._vocab:
            self._turn_off(next(token for token in tokens if not 0 <= token < self._vocab))
            return padded, np.zeros_like(counts)
        padded[np.arange(width) < counts[:, None]] = tokens
        return padded, counts

    def _turn_off(self, token: int) -> None:
        self.active = False
        logger.error(
            "%s proposed token %d, but the vocabulary has %d tokens; drafts are off until the restart: use a proposer "
            "made for this model's tokenizer",
            self._proposer.name,
            token,
            self._vocab,
        )


def draft_room(batch: RunningBatch, rows: Int32, limits: Limits) -> Int32:
    """Return how many drafts each of `rows` may have in the next step, within its length and the token budget.

    Rows that compute their newest token have drafts, once no sampling rule depends on the number of their tokens.
    No draft is computed where accepting it would pass the next border: copies of recurrent state lack no token.
    """
    total = batch.total[rows]
    single = (total - batch.computed[rows] == 1) & (total < batch.limit[rows])
    ready = single & (total - batch.inflight[rows] >= batch.drafts_from[rows])
    longest = batch.limit[rows] if limits.max_draft_len is None else np.minimum(batch.limit[rows], limits.max_draft_len)
    longest = np.minimum(longest, batch.next_border[rows])
    room: Int32 = np.clip(longest - total - 1, 0, limits.max_drafts) * ready
    left = limits.max_num_batched_tokens - np.count_nonzero(single) - (np.cumsum(room) - room)
    room = np.clip(left, 0, room).astype(np.int32)
    return room


def draft_contexts(batch: RunningBatch, rows: Int32, num_tokens: Int32) -> list[DraftContext]:
    """Return what a proposer is given for `rows`, to guess `num_tokens` [n] tokens of each."""
    columns = zip(
        batch.requests_at(rows),
        batch.drafts[rows].tolist(),
        (batch.num_drafts[rows] * (batch.inflight[rows] > 0)).tolist(),
        num_tokens.tolist(),
    )
    return [
        DraftContext(request.request_id, request.prompt, request.outputs, drafts[:count], number)
        for request, drafts, count, number in columns
    ]
