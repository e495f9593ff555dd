"""How many drafts pay, from counts of drafted and accepted tokens alone: the same trace gives the same drafts.

A step over n tokens takes the time of `c + n` units: c is what a step costs before its first token, in tokens (reading
the weights). A step of B sequences makes B tokens of it, so that a token is worth (c + B) / B units. The j-th draft of
a sequence adds a unit, and a token with the probability p^j, where p is the sequence's acceptance rate per draft: it
pays while p^j > B / (c + B).

p is estimated from the sequence's own steps, older ones discounted, and where it has few from those of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.messages import DRAFT_STATES, DraftStats
from pagoda.common.engine.scheduling.request import RunningBatch
from pagoda.common.engine.steps.contract import Int32

_KEPT: Final = 0.85
"""Weight of a sequence's counts after its next step with drafts: it remembers some 7 steps."""

_KEPT_OF_ALL: Final = 0.995
"""The same of all sequences' counts, per step of one sequence: some 200."""

_PRIOR: Final = 0.5
"""Tokens that the acceptance rate of all sequences counts for in that of one."""

_FIRST_RIGHT: Final = 1.6
_FIRST_TRIED: Final = 2.0
"""The counts of all sequences before anything is known."""

_PROBE_TOKENS: Final = 32
"""A sequence whose drafts do not pay gets one draft after this number of tokens, to see whether they do again."""

_ROW_ARRAYS: Final = ("_right", "_tried", "_probed", "_epochs")
"""Attributes of DraftLengths that have a number per row."""


@dataclass(frozen=True, slots=True)
class LengthsState:
    """The state of DraftLengths."""

    rows: dict[str, npt.NDArray[Any]]  # arrays by row, by the names of the attributes
    all_right: float
    all_tried: float


class DraftLengths:
    """The number of drafts that pay, of each running sequence."""

    def __init__(self, max_num_seqs: int, step_cost: int, disable_by_batch_size: int | None = None) -> None:
        """`step_cost`: c, in tokens. `disable_by_batch_size`: no drafts with this many running sequences or more."""
        self._step_cost = step_cost
        self._most_seqs = disable_by_batch_size
        self._right = np.zeros(max_num_seqs)  # discounted number of accepted drafts, by row
        self._tried = np.zeros(max_num_seqs)  # discounted number of drafts whose predecessors were all accepted
        self._probed = np.zeros(max_num_seqs, np.int32)  # length of the sequence when its drafts were last reported
        self._epochs = np.zeros(max_num_seqs, np.int64)
        self._all_right = _FIRST_RIGHT
        self._all_tried = _FIRST_TRIED

    def paying(self, batch: RunningBatch, rows: Int32, most: int) -> Int32:
        """Return how many drafts [n] pay in each of `rows` [n], all that run, at most `most`."""
        if self.state(len(rows)) == "batch_size":
            return np.zeros(len(rows), np.int32)
        self._reset_new(batch, rows)
        prior = self._all_right / self._all_tried
        rates = (self._right[rows] + _PRIOR * prior) / (self._tried[rows] + _PRIOR)
        least = len(rows) / (self._step_cost + len(rows))
        lengths = np.log(least) / np.log(np.clip(rates, 1e-6, 1 - 1e-6))
        paying = np.minimum(lengths, most).astype(np.int32)
        probing = (paying == 0) & (batch.total[rows] - self._probed[rows] >= _PROBE_TOKENS)
        return np.where(probing, 1, paying).astype(np.int32)

    def report(self, batch: RunningBatch, rows: Int32, drafts: Int32, accepted: Int32) -> None:
        """Take note that of the `drafts` [n > 0] of `rows` [n] the first `accepted` [n] were right."""
        self._reset_new(batch, rows)
        tried = accepted + (accepted < drafts)
        self._right[rows] = self._right[rows] * _KEPT + accepted
        self._tried[rows] = self._tried[rows] * _KEPT + tried
        self._probed[rows] = batch.total[rows]
        kept = _KEPT_OF_ALL ** len(rows)
        self._all_right = self._all_right * kept + int(accepted.sum())
        self._all_tried = self._all_tried * kept + int(tried.sum())

    def state(self, num_seqs: int) -> Literal["batch_size", "acceptance"]:
        """Return why a step of `num_seqs` sequences has no drafts, if none pay."""
        return "batch_size" if self._most_seqs is not None and num_seqs >= self._most_seqs else "acceptance"

    def copy_state(self) -> LengthsState:
        """Return a copy of the state."""
        rows = {name: getattr(self, name).copy() for name in _ROW_ARRAYS}
        return LengthsState(rows, self._all_right, self._all_tried)

    def restore(self, state: LengthsState) -> None:
        """Replace the state by that of the same number of rows."""
        for name, values in state.rows.items():
            getattr(self, name)[:] = values
        self._all_right = state.all_right
        self._all_tried = state.all_tried

    def _reset_new(self, batch: RunningBatch, rows: Int32) -> None:
        new = rows[self._epochs[rows] != batch.epoch[rows]]
        if len(new):
            self._epochs[new] = batch.epoch[new]
            self._right[new] = self._tried[new] = 0
            self._probed[new] = batch.total[new]


class DraftCounts:
    """Counters of drafts since the start. `steps`: by DRAFT_STATES, those in which a sequence could have drafts."""

    def __init__(self) -> None:
        self.steps = dict.fromkeys(DRAFT_STATES, 0)
        self._drafts = self._tokens = 0
        self._accepted: list[int] = []  # number of accepted drafts at each position

    def add(self, drafts: Int32, accepted: Int32) -> None:
        """Count the sequences of a step: `drafts` [n > 0] of each, of which the first `accepted` [n] were right."""
        self._drafts += len(drafts)
        self._tokens += int(drafts.sum())
        self._accepted += [0] * (int(drafts.max(initial=0)) - len(self._accepted))
        for position in range(int(accepted.max(initial=0))):
            self._accepted[position] += int(np.count_nonzero(accepted > position))

    def stats(self) -> DraftStats:
        """Return the counters."""
        return DraftStats(
            drafts=self._drafts,
            tokens=self._tokens,
            accepted=tuple(self._accepted),
            steps=tuple(self.steps.values()),
        )
