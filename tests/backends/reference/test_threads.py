"""Steps that are divided among threads, and the measured load that decides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engines.reference_driver import Driver, tiny_spec

from pagoda.backends.reference.threads import ComputeThreads, CoreLoad, divide, part_of
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.contract import StepPlan

LAYOUT = kv_layout(tiny_spec(), 4)


def plan(context: list[int], new: list[int], blocks: list[list[int]]) -> StepPlan:
    count = len(new)
    return StepPlan(
        step=0,
        starts=(),
        rows=np.arange(count, dtype=np.int32),
        query_start=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        context=np.array(context, np.int32),
        token_ids=np.arange(sum(new), dtype=np.int32),
        block_tables=(np.array(blocks, np.int32),),
        samples=np.ones(count, np.bool_),
    )


def test_parts_have_about_equal_cost_and_cover_the_step() -> None:
    step = plan(
        [7, 3, 0, 0, 0], [1, 1, 20, 12, 9], [[1, 2, 0, 0, 0], [3, 0, 0, 0, 0], *np.arange(4, 19).reshape(3, 5).tolist()]
    )
    parts = divide(step, 2, LAYOUT)
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3, 4]
    assert {len(part_of(step, part)[1]) for part in parts} == {21, 22}
    part, tokens = part_of(step, np.array([1, 3], np.int32))
    assert tokens.tolist() == [1, *range(22, 34)]
    assert part.token_ids.tolist() == tokens.tolist()
    assert part.query_start.tolist() == [0, 1, 13]
    assert part.block_tables[0].tolist() == [[3, 0, 0, 0, 0], [9, 10, 11, 12, 13]]


@pytest.mark.parametrize(
    "step",
    [
        plan([7] * 4, [1] * 4, [[1, 2], [3, 4], [5, 6], [7, 8]]),  # too small
        plan([0], [40], [list(range(1, 11))]),  # one sequence
        plan([0, 8], [20, 20], [[1, 2, 3, 4, 5, 0, 0], [1, 2, 6, 7, 8, 9, 10]]),  # blocks that are written in this step
    ],
)
def test_steps_that_are_not_divided(step: StepPlan) -> None:
    assert divide(step, 2, LAYOUT) == []


def test_blocks_written_earlier_may_be_shared() -> None:
    step = plan([8, 8], [20, 20], [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9, 10, 11, 12]])
    assert [part.tolist() for part in divide(step, 2, LAYOUT)] == [[0], [1]]


def test_load_counts_the_cores_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([(0.0, 0.0, 0.0), (1.0, 1.8, 1.9), (2.0, 2.8, 3.9), (3.0, 4.3, 5.85), (4.0, 6.2, 7.85)])
    monkeypatch.setattr("pagoda.backends.reference.threads.time.monotonic", lambda: 1e9)
    load, seen = CoreLoad(lambda: next(clock)), []
    for _ in range(4):
        load.update()
        seen.append((round(load.others, 2), load.contended))
    assert seen == [(0.1, False), (1.0, True), (0.45, True), (0.1, False)]


def test_threads_are_as_many_as_cores_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.backends.reference.threads.os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(CoreLoad, "update", lambda self: None)
    before, threads = torch.get_num_threads(), ComputeThreads(4)
    try:
        for others, expected in ((0.0, 4), (1.2, 3), (9.0, 1), (0.0, 4)):
            threads.load.others, threads.load.contended = others, others > 0.5
            threads.together()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_divided_step_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(CoreLoad, "update", lambda self: None)
    monkeypatch.setattr("pagoda.backends.reference.threads.TOKENS_PER_PART", 1)
    prompts = {row: [(7 * row + 3 * i) % 90 for i in range(12 + row)] for row in range(6)}
    results = []
    for contended in (False, True):
        results.append([])
        driver = Driver(tiny_spec(), dtype="bfloat16")
        if not getattr(driver.backend._decoder, "is_row_wise", False):
            pytest.skip("the processor has no AVX512-BF16")
        threads = driver.backend._threads
        threads.count, threads.load.contended = 2, contended
        starts = [driver.start(row, tokens) for row, tokens in prompts.items()]
        for tokens in (prompts, {row: [row] for row in prompts}, {row: [3] for row in prompts}):
            results[-1] += driver.step(tokens, starts)[1].token_ids.tolist()
            starts = []
        assert (threads._apart is not None) == contended
        driver.backend.close()
    assert results[0] == results[1]
