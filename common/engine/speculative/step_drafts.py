"""The drafts of a scheduler's steps: as many as blocks are free for, and what the model accepts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import RunningBlocks
from pagoda.common.engine.messages import DraftStats
from pagoda.common.engine.scheduling.request import Request, RunningBatch, SchedulerPart
from pagoda.common.engine.speculative.device import DeviceDrafts
from pagoda.common.engine.speculative.proposer import DraftPlanner, PlannerState
from pagoda.common.engine.steps.contract import Bool, Int32, StepPlan


@dataclass(frozen=True, slots=True)
class DraftsState:
    """The state of StepDrafts but for the counts of drafts, which are the batch's."""

    planner: PlannerState
    drafts: Int32  # [rows, most drafts] token ids of the newest step's drafts
    guesses: Int32  # [rows, most drafts] token ids that the device guessed, once they are known


class StepDrafts(SchedulerPart[DraftsState]):
    """Plans the drafts of one scheduler's steps and takes their results. `planner`: says how many, and which."""

    def __init__(self, planner: DraftPlanner, limits: Limits, batch: RunningBatch, blocks: RunningBlocks) -> None:
        self._planner = planner
        self.plans_ahead = planner.plans_ahead  # False: no step is planned while the drafts of another are in flight
        self._limits = limits
        self._batch = batch
        self._blocks = blocks

    def propose(self, rows: Int32, slow_rows: list[int]) -> bool:
        """Set the drafts of the next step in the batch: of `rows`, all that run, but not of `slow_rows`.

        Returns False once a proposer was turned off: there are no drafts any more.
        """
        planner = self._planner
        if not planner.active:
            return False
        planner.propose(self._batch, rows, self._limits)
        if slow_rows:
            self._batch.num_drafts[slow_rows] = 0
        return True

    def allocate(self, rows: Int32, tokens: Int32) -> Int32 | None:
        """Return the proposed drafts [n] of `rows` [n], as far as blocks are free for them; None if there are none.

        `tokens` [n]: what each row computes without drafts.
        """
        batch = self._batch
        drafts = batch.num_drafts[rows]
        if not drafts.any():
            return None
        end = batch.computed[rows] + tokens + drafts
        for i in np.flatnonzero(end > batch.capacity[rows]).tolist():
            row = int(rows[i])
            if not self._blocks.allocate(row, int(end[i])):
                drafts[i] -= end[i] - batch.capacity[row]
                batch.num_drafts[row] = drafts[i]
        return drafts if drafts.any() else None

    def allocate_guesses(self, rows: Int32, end: Int32, samples: Bool, slow_rows: list[int]) -> Int32 | None:
        """Return how many tokens the device guesses after each of `rows` [S], as far as blocks are free for them.

        `end` [S]: the sequence's tokens after the step; `samples` bool [S]; `slow_rows` have no guesses. None: no
        sequence has guesses, or they are made by the host.
        """
        if not isinstance(self._planner, DeviceDrafts):
            return None
        batch = self._batch
        guesses = self._planner.guesses(batch, rows, end, samples, self._limits)
        if slow_rows:
            guesses[np.isin(rows, slow_rows)] = 0
        for i in np.flatnonzero((guesses > 0) & (end + guesses > batch.capacity[rows])).tolist():
            row = int(rows[i])
            if not self._blocks.allocate(row, int(end[i] + guesses[i])):
                guesses[i] = max(0, batch.capacity[row] - end[i])
        batch.num_guesses[rows] = guesses
        return guesses if guesses.any() else None

    def take(self, plan: StepPlan, drafts: Int32, token_ids: Int32, live: Bool) -> tuple[Int32, list[list[int]]]:
        """Report the drafts of the `live` sequences. Returns the newest token [S] and the accepted drafts of each.

        `drafts` [S]: those of the plan. `token_ids` [S, n]: the sampled ones, -1 after the last.
        """
        accepted = np.count_nonzero(token_ids >= 0, axis=1).astype(np.int32) - 1
        rows = plan.rows[live]
        drafts = drafts[live]
        self._batch.report_drafts(rows, drafts, drafts - accepted[live])
        self._planner.report(self._batch, rows, drafts, accepted[live])
        lists = [ids[:count] for ids, count in zip(token_ids.tolist(), accepted.clip(min=0).tolist())]
        return token_ids[np.arange(plan.num_seqs), accepted], lists

    def finished(self, request: Request) -> None:
        self._planner.finish(request.request_id, request.outputs)

    def stats(self) -> DraftStats:
        """Return the counters since the start."""
        return self._planner.stats()

    def state(self) -> DraftsState:
        return DraftsState(self._planner.state(), self._batch.drafts.copy(), self._batch.guesses.copy())

    def restore(self, state: DraftsState, requests: Sequence[Request]) -> None:
        self._planner.restore(state.planner)
        self._batch.drafts[:] = state.drafts
        self._batch.guesses[:] = state.guesses


def step_drafts(
    planner: DraftPlanner | None, limits: Limits, batch: RunningBatch, blocks: RunningBlocks
) -> StepDrafts | None:
    """Return the part that plans a scheduler's drafts; None without speculative decoding.

    `planner` None: the drafts that the device makes, if `limits` say so.
    """
    if limits.device_drafts and planner is None:
        planner = DeviceDrafts()
    return None if planner is None or not limits.max_drafts else StepDrafts(planner, limits, batch, blocks)
