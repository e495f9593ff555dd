"""How many drafts pay: a function of counts, of the batch and of what a step costs."""

from __future__ import annotations

import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.engine.messages import DraftStats
from pagoda.common.engine.scheduling.request import RunningBatch
from pagoda.common.engine.speculative.draft_lengths import DraftCounts, DraftLengths
from pagoda.common.engine.steps.contract import Int32

MOST = 7


def rows(*numbers: int) -> Int32:
    return np.array(numbers, np.int32)


def running(num_rows: int) -> tuple[RunningBatch, Int32]:
    """Return a batch whose first rows run, each with 10 tokens."""
    batch = RunningBatch(256, MOST)
    batch.epoch[:num_rows] = np.arange(1, num_rows + 1)
    batch.total[:num_rows] = 10
    return batch, np.arange(num_rows, dtype=np.int32)


def taught(lengths: DraftLengths, batch: RunningBatch, every: Int32, drafts: int, accepted: int, times: int) -> None:
    for _ in range(times):
        count = len(every)
        lengths.report(batch, every, np.full(count, drafts, np.int32), np.full(count, accepted, np.int32))


def test_right_drafts_make_more_and_wrong_ones_fewer() -> None:
    batch, every = running(2)
    lengths = DraftLengths(256, 8)
    taught(lengths, batch, every[:1], 4, 4, 10)
    taught(lengths, batch, every[1:], 4, 0, 10)
    assert lengths.paying(batch, every, MOST).tolist() == [MOST, 0]


def test_a_rate_gives_the_length_at_which_a_draft_stops_to_pay() -> None:
    batch, every = running(1)
    lengths = DraftLengths(256, 7)
    taught(lengths, batch, every, 2, 1, 200)  # one right, then one wrong: half
    assert lengths.paying(batch, every, MOST).tolist() == [3], "0.5 ** 3 = 1 / (7 + 1)"


@each_row(("num_rows", "want"), [(1, MOST), (16, 5), (64, 2), (256, 1)])
def test_large_batches_have_fewer(num_rows: int, want: int) -> None:
    batch, every = running(num_rows)
    lengths = DraftLengths(256, 256)
    taught(lengths, batch, every, 3, 1, 40)
    taught(lengths, batch, every, 2, 2, 1)
    assert lengths.paying(batch, every, MOST).tolist() == [want] * num_rows


def test_a_new_sequence_starts_from_the_rate_of_all() -> None:
    batch, every = running(3)
    lengths = DraftLengths(256, 8)
    first = lengths.paying(batch, every, MOST)
    assert (first > 0).all(), "before anything is known drafts are tried"
    taught(lengths, batch, every[:1], 4, 4, 100)
    batch.epoch[0] = 99  # another request in the row of one
    assert lengths.paying(batch, every, MOST).tolist() == [MOST] * 3
    taught(lengths, batch, every[1:2], 4, 0, 400)
    batch.epoch[1] = 100
    assert lengths.paying(batch, every, MOST)[1] == 0


def test_a_sequence_whose_drafts_do_not_pay_tries_one_now_and_then() -> None:
    batch, every = running(1)
    lengths = DraftLengths(256, 8)
    taught(lengths, batch, every, 4, 0, 50)
    got = []
    for total in range(10, 10 + 70):
        batch.total[0] = total
        got.append(int(lengths.paying(batch, every, MOST)[0]))
        if got[-1]:
            taught(lengths, batch, every, 1, 0, 1)
    assert got == [int(step in (32, 64)) for step in range(70)]


@pytest.mark.parametrize(("num_rows", "want"), [(3, True), (4, False), (5, False)])
def test_no_drafts_from_a_number_of_sequences_on(num_rows: int, want: bool) -> None:
    batch, every = running(num_rows)
    lengths = DraftLengths(256, 8, disable_by_batch_size=4)
    assert (lengths.paying(batch, every, MOST) > 0).all() == want
    assert lengths.state(num_rows) == ("acceptance" if want else "batch_size")


def test_counters() -> None:
    counts = DraftCounts()
    assert counts.stats() == DraftStats()
    counts.add(rows(3, 1, 2), rows(3, 0, 1))
    counts.add(rows(4), rows(1))
    counts.steps["no_match"] += 1
    assert counts.stats() == DraftStats(drafts=4, tokens=10, accepted=(3, 1, 1, 0), steps=(0, 1, 0, 0))
