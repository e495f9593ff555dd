"""The rows of running requests."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import NEVER, NO_ROW, Request, RunningBatch
from pagoda.common.engine.steps.contract import PREVIOUS


def request(*tokens: int) -> Request:
    asked = EngineRequest(request_id="r", prompt_token_ids=list(tokens), rules=SamplingRules(), max_tokens=4)
    made = Request.of(asked, limit=len(tokens) + 4, rank=(1,))
    made.tokens = made.prompt
    return made


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_row_is_assigned_and_released() -> None:
    batch, one, two = RunningBatch(2), request(5, 6, 7), request(8)
    assert (batch.num_free, batch.next_free()) == (2, 0)
    batch.assign(one, 2)
    assert (one.row, batch.num_free, batch.next_free()) == (0, 1, 1)
    numbers = (batch.computed, batch.total, batch.limit, batch.newest, batch.inflight, batch.next_page, batch.masked)
    assert [each[0] for each in numbers] == [2, 3, 7, 7, 0, NEVER, False]
    batch.assign(two, 0)
    epochs = batch.epoch.tolist()
    assert len({0, *epochs}) == 3
    assert batch.request_at(0) is one
    assert batch.requests_at(rows(1, 0)) == [two, one]
    batch.release(one)
    assert (one.row, batch.num_free, batch.next_free(), batch.epoch[0]) == (NO_ROW, 1, 0, 0)
    with pytest.raises(RuntimeError, match="row 0 is free"):
        batch.request_at(0)
    assert batch.requests_at(rows(0, 1)) == [two]
    batch.inflight[0], batch.next_page[0], batch.drafts_inflight[0] = 3, 9, 2
    batch.assign(one, 0)
    assert (batch.inflight[0], batch.next_page[0], batch.drafts_inflight[0]) == (0, NEVER, 0)
    assert batch.epoch[0] not in (0, *epochs)


def test_tokens_of_a_step() -> None:
    batch = RunningBatch(3)
    for each, computed in ((request(5, 6, 7), 1), (request(8), 0), (request(9, 10, 11, 12), 1)):
        batch.assign(each, computed)
    batch.newest[1] = PREVIOUS
    starts = np.array([0, 1, 3, 5], np.int32)
    ids = batch.token_ids(rows(1, 0, 2), rows(1, 2, 2), starts, np.array([True, True, False]))
    assert ids.tolist() == [PREVIOUS, 6, 7, 10, 11]
    one = batch.token_ids(rows(2), rows(1), starts[:2], np.array([False]))
    assert one.tolist() == [10], "a chunk of one token is not the newest"
    assert batch.token_ids(rows(0, 1), rows(1, 1), starts[:3], np.array([True, True])).tolist() == [7, PREVIOUS]


def test_plans_and_reports() -> None:
    batch = RunningBatch(2)
    for each in (request(5, 6, 7), request(8, 9)):
        batch.assign(each, 0)
    batch.next_page[:] = [5, 5]
    batch.plan(rows(1, 0), rows(1, 3), np.array([False, True]))
    assert (batch.computed.tolist(), batch.total.tolist()) == ([3, 1], [4, 2])
    assert (batch.inflight.tolist(), batch.newest.tolist()) == ([1, 0], [PREVIOUS, 9])
    batch.plan(rows(0), rows(1), np.array([True]))
    assert batch.report(rows(0), rows(20)).tolist() == [], "4 are known"
    assert (batch.inflight[0], batch.newest[0]) == (1, PREVIOUS)
    assert batch.report(rows(0), rows(21)).tolist() == [0]
    assert (batch.inflight[0], batch.newest[0], batch.total[0]) == (0, 21, 5)


def test_drafts_are_planned_as_accepted_and_the_rejected_ones_taken_back() -> None:
    batch = RunningBatch(2, 3)
    for each in (request(5, 6, 7), request(8, 9)):
        batch.assign(each, len(each.prompt) - 1)
    batch.drafts[0], batch.num_drafts[0] = (20, 21, 22), 2
    starts, drafts, every = np.array([0, 1, 4], np.int32), rows(0, 2), np.array([True, True])
    assert batch.token_ids(rows(1, 0), rows(1, 3), starts, every, drafts).tolist() == [9, 7, 20, 21]
    batch.plan(rows(1, 0), rows(1, 3), every, drafts)
    numbers = (batch.computed, batch.total, batch.inflight, batch.drafts_inflight)
    assert [each.tolist() for each in numbers] == [[5, 2], [6, 3], [3, 1], [2, 0]]
    batch.num_drafts[:] = [2, 1]  # drafts of a step that is planned ahead
    batch.report_drafts(rows(1, 0), drafts, rows(0, 1))
    batch.report(rows(1, 0), rows(30, 31))
    assert [each.tolist() for each in numbers] == [[4, 2], [5, 3], [0, 0], [0, 0]]
    assert (batch.newest.tolist(), batch.num_drafts.tolist()) == ([31, 30], [0, 1])
