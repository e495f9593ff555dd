"""The load of a step, as models of step times see it."""

from __future__ import annotations

import numpy as np

from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.engine.steps.contract import StepPlan


def plan_of(query: list[int], context: list[int], samples: list[bool], **more: object) -> StepPlan:
    return StepPlan(
        step=0,
        starts=(),
        rows=np.arange(len(query), dtype=np.int32),
        query_start=np.concatenate([[0], np.cumsum(query)]).astype(np.int32),
        context=np.array(context, np.int32),
        token_ids=np.zeros(sum(query), np.int32),
        block_tables=(),
        samples=np.array(samples),
        **more,  # type: ignore[arg-type]
    )


def test_lengths_and_sampled_positions() -> None:
    load = StepLoad.of(plan_of([1, 5, 3], [9, 0, 4], [True, False, True]))
    assert load.query_lens.tolist() == [1, 5, 3]
    assert load.context_lens.tolist() == [10, 5, 7]
    assert (load.num_tokens, load.num_sampled, load.num_drafts, load.num_guesses) == (9, 2, 0, 0)


def test_drafts_have_logits_and_rejected_ones_no_context() -> None:
    drafts, guesses = np.array([2, 0], np.int32), np.array([3, 1], np.int32)
    plan = plan_of([3, 4], [10, 0], [True, True], num_drafts=drafts, num_guesses=guesses)
    load = StepLoad.of(plan, np.array([2, 0], np.int32))
    assert load.context_lens.tolist() == [11, 4]
    assert (load.num_sampled, load.num_drafts, load.num_guesses) == (4, 2, 4)
