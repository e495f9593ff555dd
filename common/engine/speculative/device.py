"""Drafts that a drafter model guesses on the device: the host plans how many, and never needs to know which."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.request import RunningBatch
from pagoda.common.engine.speculative.proposer import draft_room
from pagoda.common.engine.step import GUESSED, Bool, Int32


class DeviceDrafts:
    """Gives a row, as the drafts of its next step, the guesses that follow its newest one."""

    active: Final = True

    def propose(self, batch: RunningBatch, rows: Int32, limits: Limits) -> None:
        """Set the drafts of the next step in the batch: of `rows`, all that run. Other rows have none."""
        batch.num_drafts[:] = 0
        batch.num_drafts[rows] = np.minimum(draft_room(batch, rows, limits), batch.num_guesses[rows])
        batch.drafts[rows] = GUESSED


def guess_room(batch: RunningBatch, rows: Int32, end: Int32, samples: Bool, most: int) -> Int32:
    """Return how many tokens, of `most`, the drafter may guess after each sequence of a step [S], within its length.

    `end` [S]: tokens of each sequence after the step, drafts included; `samples` bool [S].
    """
    room: Int32 = np.clip(batch.limit[rows] - end - 2, 0, most) * samples  # one token is sampled before the guesses
    return room.astype(np.int32)
