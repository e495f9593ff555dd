"""The token masks of a step's sequences, computed in bounded time however long a grammar takes to say what may follow.

A mask is computed as soon as its sequence's newest token is known, unless that of the token before was slow. Slow ones,
and those for which a step has no time left, are late: a few are computed before each step, and their sequences run
again then. Other clients' sequences go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagoda.common.engine.scheduling.request import NO_ROW, Request, RequestStatus, RunningBatch, SchedulerPart
from pagoda.common.engine.steps.contract import GUESSED, Bool, Int32, StepPlan, TokenMasks
from pagoda.common.engine.structured_output.grammar import Bits
from pagoda.common.engine.structured_output.memory import ResidentMemory
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, masks_after, refresh_masks

NO_MASK: Final = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows all of its tokens."""

STEP_SECONDS: Final = 0.25
"""For the masks of a step, and once more for late ones before the next; those that were begun are completed."""

SLOW_SECONDS: Final = 0.005
"""A mask that took longer is slow, and the next of its answer is late. Usual ones take 50 us."""

GROUP: Final = 4
"""Masks computed at once. The answers of one grammar take turns, so 4 of the slowest take about a second."""

Clock = Callable[[], float]

FinishStatus = Callable[[Request, int, int], RequestStatus]
"""The status of a request after a token, the last of so many generated."""


@dataclass(frozen=True, slots=True)
class MasksState:
    """The state of StepMasks but for the grammars' states, which are in `Request.mask_state`."""

    late: tuple[str, ...]  # requests whose next mask is not computed
    slow: tuple[str, ...]  # requests whose newest mask took long


class StepMasks(SchedulerPart[MasksState]):
    """Computes the masks of one scheduler's requests. `clock`: seconds; `memory`: what the process uses."""

    needs = "mask_state"

    def __init__(self, clock: Clock, memory: ResidentMemory | None = None) -> None:
        self.num_requests = 0  # unfinished requests with token masks
        self._clock = clock
        self._memory = memory or ResidentMemory()
        self._late: dict[str, Request] = {}  # the mask that they need next is not computed
        self._failed: list[tuple[Request, str]] = []
        self.slow: dict[str, Request] = {}  # likely to be late again: no step is planned before the mask is known

    @property
    def has_late(self) -> bool:
        """Whether a mask is to be computed before its request can run again."""
        return bool(self._late)

    @property
    def num_withheld(self) -> int:
        """How many requests may have to miss the next step because their masks take long."""
        return len(self._late.keys() | self.slow.keys())

    def take_failed(self) -> list[tuple[Request, str]]:
        """Return the unfinished requests whose grammar failed while a late mask was computed, each with its error."""
        failed = self._failed
        self._failed = []
        return [(request, error) for request, error in failed if not request.is_finished]

    def added(self, request: Request) -> None:
        self.num_requests += 1

    def finished(self, request: Request) -> None:
        self.num_requests -= 1
        self._late.pop(request.request_id, None)
        self.slow.pop(request.request_id, None)
        if request.mask_state is not None:
            request.mask_state.release()

    def state(self) -> MasksState:
        return MasksState(late=tuple(self._late), slow=tuple(self.slow))

    def restore(self, state: MasksState, requests: Sequence[Request]) -> None:
        self.num_requests = len(requests)
        by_id = {request.request_id: request for request in requests}
        self._late = {name: by_id[name] for name in state.late if name in by_id}
        self.slow = {name: by_id[name] for name in state.slow if name in by_id}

    def rows_to_run(self, batch: RunningBatch) -> Int32:
        """Return the rows, int32 [n], of the running requests that may be in the next step, by rank."""
        if not (self._late or self.slow):
            return batch.order
        inflight = batch.inflight
        rows = [request.row for request in batch.running if not self.withholds(request, int(inflight[request.row]))]
        return np.array(rows, np.int32)

    @property
    def slow_rows(self) -> list[int]:
        """The rows whose masks take long, so that drafts would need several such."""
        return [request.row for request in self.slow.values() if request.row != NO_ROW]

    def add_late(self, requests: Iterable[Request]) -> None:
        """Compute their masks later."""
        self._late.update((request.request_id, request) for request in requests)

    def withholds(self, request: Request, inflight: int) -> bool:
        """Whether a request with `inflight` unknown tokens may not be in the next step."""
        name = request.request_id
        return name in self._late or (inflight > 0 and name in self.slow)

    def catch_up(self) -> None:
        """Compute late masks for a while, at least one."""
        late = list(self._late.values())
        self._refresh([(request, request.outputs) for request in late], STEP_SECONDS, group=1)
        for request in late:
            if request.mask_state is not None and not request.mask_state.is_stale:
                del self._late[request.request_id]
                if request.mask_state.error is not None:
                    self._failed.append((request, request.mask_state.error))

    def _refresh(self, needing: Sequence[tuple[Request, Sequence[int]]], seconds: float, group: int) -> None:
        """Compute the masks of requests with their outputs for some seconds, the first group of them in any case.

        The states of the others stay stale.
        """
        states = [(request, request.mask_state, outputs) for request, outputs in needing]
        asking = [(request, state, outputs) for request, state, outputs in states if state and state.consults_grammar]
        refresh_masks([(state, outputs) for _, state, outputs in states if state and not state.consults_grammar])
        if not asking:
            return
        used = self._memory.bytes
        most = 0.0
        slowest: list[TokenMaskState] = []
        begin = self._clock()
        before = begin
        for first in range(0, len(asking), group):
            some = asking[first : first + group]
            refresh_masks([(state, outputs) for _, state, outputs in some])
            now = self._clock()
            for request, _, _ in some:
                self._measured(request, (now - before) / len(some))
            if now - before > most:
                most = now - before
                slowest = [state for _, state, _ in some]
            if now - begin > seconds:
                break
            before = now
        if slowest and (grown := self._memory.bytes - used) > 0:  # states that a library keeps take time, too
            for state in slowest:
                state.grow(grown // len(slowest))

    def _measured(self, request: Request, seconds: float) -> None:
        if seconds > SLOW_SECONDS:
            self.slow[request.request_id] = request
        else:
            self.slow.pop(request.request_id, None)

    def advance(
        self,
        requests: Sequence[Request],
        tokens: list[int],
        finish_status: FinishStatus,
        drafts: Sequence[list[int]] | None = None,
    ) -> tuple[dict[int, RequestStatus], list[int]]:
        """Advance mask states by the drafts and the token of each request, as in `append_tokens`; compute the masks.

        Returns the status of the requests that end by it, by index in `requests`, and the indices of those whose mask
        is late. What comes after an end is dropped.
        """
        ended: dict[int, RequestStatus] = {}
        advancing = [
            (index, request, request.mask_state, [token] if drafts is None else [*drafts[index], token])
            for index, (request, token) in enumerate(zip(requests, tokens))
            if request.mask_state is not None and token >= 0 and not request.is_finished
        ]
        all_advancing = advancing
        begin = self._clock()
        count = 0
        while advancing:
            count += 1
            advanced: list[tuple[int, Request, TokenMaskState, list[int]]] = []
            for answer in advancing:
                _, request, state, new = answer
                status = finish_status(request, new[count - 1], len(request.outputs) + count)
                if status is RequestStatus.RUNNING:
                    state.accept(new[count - 1])
                    advanced.append(answer)
            going_on = [answer for answer in advanced if not answer[2].finished and answer[2].error is None]
            quick = [answer for answer in going_on if answer[1].request_id not in self.slow]
            left = STEP_SECONDS - (self._clock() - begin)
            self._refresh([(request, [*request.outputs, *new[:count]]) for _, request, _, new in quick], left, GROUP)
            for index, _, state, new in advanced:
                if state.finished or state.error is not None:
                    ended[index] = _ended(state)
                    if drafts is not None and count < len(new):
                        end_at(index, count, tokens, drafts)
            advancing = [answer for answer in going_on if answer[0] not in ended and count < len(answer[3])]
        return ended, [index for index, _, state, _ in all_advancing if state.is_stale and index not in ended]

    def of_step(
        self, requests: Sequence[Request], plan: StepPlan, masked: Int32, guesses: Int32
    ) -> tuple[TokenMasks, list[int]]:
        """Return the masks of the plan's `masked` sequences; none for `requests` of the step that ended since.

        `guesses` int32 [rows, most drafts]: what the drafter guessed after the step before. Also returns the indices
        of the sequences with drafts for whose masks there is no time: what they sample does not count.
        """
        masks: list[tuple[int, int, Bits]] = []
        late: list[int] = []
        begin = self._clock()
        for index in masked.tolist():
            request = requests[index]
            state = request.mask_state
            if state is None or request.is_finished or state.is_stale:
                continue
            drafts = 0 if plan.num_drafts is None else int(plan.num_drafts[index])
            if drafts and self._clock() - begin > STEP_SECONDS:
                late.append(index)
            elif drafts:
                end = int(plan.query_start[index + 1])
                ids = plan.token_ids[end - drafts : end].tolist()
                if ids[0] == GUESSED:
                    ids = guesses[plan.rows[index], :drafts].tolist()
                before = self._clock()
                after = enumerate(masks_after(state, ids, request.outputs))
                self._measured(request, (self._clock() - before) / (1 + drafts))
                masks += [(index, count, bits) for count, bits in after if not (bits == NO_MASK).all()]
            elif state.bits is not None:
                masks.append((index, 0, state.bits))
        if not masks:
            return TokenMasks(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.uint32)), late
        sequences, afters, bits = zip(*masks)
        return TokenMasks(np.array(sequences, np.int32), np.array(afters, np.int32), np.stack(bits)), late


def _ended(state: TokenMaskState) -> RequestStatus:
    return RequestStatus.FINISHED_STOPPED if state.error is None else RequestStatus.FINISHED_ERROR


def end_at(index: int, count: int, tokens: list[int], drafts: Sequence[list[int]]) -> None:
    """Make a request's draft number `count`, from 1, its newest token."""
    tokens[index] = drafts[index][count - 1]
    del drafts[index][count - 1 :]


def masked_sequences(batch: RunningBatch, rows: Int32, samples: Bool, drafts: Int32 | None = None) -> Int32 | None:
    """Return the indices in `rows` [n] of those that sample under a mask, or may once the tokens in flight are known.

    `samples` bool [n]: they sample. `drafts` [n]: of each in this step. None if there are none.
    """
    unknown = batch.inflight[rows] if drafts is None else batch.inflight[rows] + drafts
    indices = [
        index
        for index in np.flatnonzero(samples & batch.masked[rows]).tolist()
        if (state := batch.request_at(int(rows[index])).mask_state) is not None
        and (state.bits is not None or state.depends_on(int(unknown[index])))
    ]
    return np.array(indices, np.int32) if indices else None
