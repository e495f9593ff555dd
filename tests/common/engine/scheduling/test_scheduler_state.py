"""A scheduler in the state of another one plans the same steps, with each part: fairness, adapters, masks, drafts."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from fakes import full_layout
from support.engines.scripted_masks import ScriptedMask, SlowLibrary
from support.suite.clock import Clock

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.messages import EngineRequest, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.draft_lengths import DraftLengths
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import Drafter
from pagoda.common.engine.steps.contract import StepPlan, StepResult

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=4, block_size=4)
VOCAB = 40
ADAPTERS = [Adapter(number=number, name=f"a{number}", path=f"/{number}") for number in range(1, 5)]
CASES = {
    "fairness": LIMITS,
    "priority": replace(LIMITS, policy="priority"),
    "adapters": replace(LIMITS, max_loras=2),
    "masks": LIMITS,
    "drafts": replace(LIMITS, max_drafts=3),
    "drafts of the device": replace(LIMITS, max_drafts=2, device_drafts=True),
}


class Driven:
    """A scheduler whose steps have made-up results, two of them in flight."""

    def __init__(self, name: str, clock: Clock) -> None:
        limits = CASES[name]
        kv = KvManager(full_layout(4), (30,), max_num_seqs=4, max_model_len=64, max_step_tokens=limits.max_step_tokens)
        drafter = Drafter(NgramProposer(1, 3), VOCAB, DraftLengths(4, 20)) if name == "drafts" else None
        self.scheduler = Scheduler(limits, kv, clock=lambda: clock.now, drafter=drafter)
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.slots.ready = set(ADAPTERS)
        self.flights: deque[StepPlan] = deque()

    def step(self) -> tuple[list[object], StepOutputs | None]:
        """Plan until two steps are in flight, then report one. Returns the plans as values, and the outputs."""
        plans: list[object] = []
        while len(self.flights) < 2 and (plan := self.scheduler.schedule()) is not None:
            self.flights.append(plan)
            plans.append(_values(plan))
        if not self.flights:
            return plans, None
        plan = self.flights.popleft()
        return plans, self.scheduler.update(plan, self._result(plan))

    def _result(self, plan: StepPlan) -> StepResult:
        masks = self.scheduler.token_masks(plan)
        newest = np.where(plan.samples, (plan.context * 7 + plan.step) % 6, -1).astype(np.int32)
        if masks is not None:
            for sequence, bits in zip(masks.sequences.tolist(), masks.bits):
                allowed = [token for token in range(VOCAB) if bits[token // 32] >> np.uint32(token % 32) & 1]
                newest[sequence] = allowed[plan.step % len(allowed)]
        if plan.num_drafts is None:
            return StepResult(plan.step, newest, guesses=self._guesses(plan))
        columns = np.arange(1 + plan.num_drafts.max())
        accepted = np.minimum(plan.num_drafts, plan.step % 3)
        tokens = np.where(columns <= accepted[:, None], newest[:, None], -1).astype(np.int32)
        return StepResult(plan.step, tokens, guesses=self._guesses(plan))

    @staticmethod
    def _guesses(plan: StepPlan) -> np.ndarray | None:
        return None if plan.num_guesses is None else np.full((plan.num_seqs, 2), 3, np.int32)


def _values(plan: StepPlan) -> object:
    arrays = (plan.rows, plan.query_start, plan.context, plan.token_ids, plan.samples, *plan.block_tables)
    optional = (plan.num_drafts, plan.num_guesses, plan.masked, plan.adapter_slots)
    starts = [start.row for start in plan.starts]
    return (
        plan.step,
        starts,
        plan.adapter_loads,
        [array.tolist() for array in arrays],
        [None if array is None else array.tolist() for array in optional],
    )


def _add(scheduler: Scheduler, name: str, number: int, draw: random.Random, library: SlowLibrary) -> None:
    prompt = [draw.randrange(3)] * draw.randint(1, 20) + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 9))]
    request = EngineRequest(
        request_id=str(number),
        prompt_token_ids=prompt,
        rules=SamplingRules(),
        max_tokens=draw.randint(1, 12),
        priority=draw.randrange(3),
        owner=draw.choice("ab"),
        adapter=draw.choice([None, *ADAPTERS]) if name == "adapters" else None,
    )
    is_masked = name == "masks" and draw.random() < 0.7
    scheduler.add(request, ScriptedMask(VOCAB, library) if is_masked else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_a_restored_scheduler_plans_the_same_steps(name: str) -> None:
    clock = Clock()
    library = SlowLibrary(clock, 20)
    draw = random.Random(1)
    first = Driven(name, clock)
    for number in range(40):
        _add(first.scheduler, name, number, draw, library)
        first.step()
    assert first.scheduler.waiting
    second = Driven(name, clock)
    shared = {id(library): library}
    state, second.flights = copy.deepcopy((first.scheduler.state(), first.flights), shared)
    second.scheduler.restore(state)
    second.scheduler.check_integrity()
    for _ in range(400):
        before = library.count
        expected = first.step()
        library.count = before
        plans, outputs = second.step()
        assert plans == expected[0]
        assert (outputs is None) == (expected[1] is None)
        if outputs is not None and expected[1] is not None:
            assert _without_times(outputs) == _without_times(expected[1])
        if not first.scheduler.num_unfinished and not first.flights:
            break
    assert first.scheduler.num_unfinished == second.scheduler.num_unfinished == 0
    second.scheduler.check_integrity()


def _without_times(outputs: StepOutputs) -> list[tuple[str, list[int], str | None]]:
    return [(each.request_id, each.new_token_ids, each.finish_reason) for each in outputs.outputs]
