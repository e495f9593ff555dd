"""Drafts that a drafter model guesses on the device: the host plans how many, and never needs to know which."""

from __future__ import annotations

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.scheduling.request import RunningBatch
from pagoda.common.engine.speculative.proposer import DraftPlanner, draft_room
from pagoda.common.engine.steps.contract import GUESSED, Bool, Int32


class DeviceDrafts(DraftPlanner):
    """Gives a row, as the drafts of its next step, the guesses that follow its newest one."""

    def propose(self, batch: RunningBatch, rows: Int32, limits: Limits) -> None:
        room = draft_room(batch, rows, limits)
        batch.num_drafts[:] = 0
        batch.num_drafts[rows] = np.minimum(room, batch.num_guesses[rows])
        batch.drafts[rows] = GUESSED
        if batch.num_drafts.any():
            self._counts.steps["drafted"] += 1
        elif room.any() and self._lengths is not None:
            self._counts.steps[self._lengths.state(len(rows))] += 1

    def guesses(self, batch: RunningBatch, rows: Int32, end: Int32, samples: Bool, limits: Limits) -> Int32:
        """Return how many tokens to guess after each sequence of a step [S]: as many as may be its next drafts.

        `end` [S]: tokens of each sequence after the step, drafts included; `samples` bool [S].
        """
        longest = batch.limit[rows]
        if limits.max_draft_len is not None:
            longest = np.minimum(longest, limits.max_draft_len)
        # One token is sampled before the guesses, and the last token of a sequence is never a draft.
        room = np.clip(longest - end - 2, 0, limits.max_drafts) * samples
        if self._lengths is not None and room.any():
            room = np.minimum(room, self._lengths.paying(batch, rows, limits.max_drafts))
        guesses: Int32 = room.astype(np.int32)
        return guesses
