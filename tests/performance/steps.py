"""Engine steps until all requests of fixed traces are answered, over a backend without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fakes import FakeBackend, full_layout, scrambled

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import Drafter
from pagoda.common.engine.steps.contract import StepPlan


@dataclass(frozen=True)
class Trace:
    """Requests that come at the steps that `arrivals` names, and the engine that answers them."""

    requests: tuple[EngineRequest, ...]
    arrivals: tuple[int, ...]
    blocks: int = 400
    limits: Mapping[str, int | bool] = field(default_factory=dict)
    drafts: int = 0
    next_token: Callable[[list[int]], int] = scrambled


def some_requests(count: int, common: int = 0) -> tuple[EngineRequest, ...]:
    """Requests of random lengths whose prompts begin with the same `common` tokens."""
    draw = random.Random(count)
    shared = [draw.randrange(50) for _ in range(common)]
    return tuple(
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[*shared, *(draw.randrange(50) for _ in range(draw.randrange(1, 60)))],
            rules=SamplingRules(),
            max_tokens=draw.randrange(1, 40),
        )
        for number in range(count)
    )


def repeating(history: list[int]) -> int:
    """A text in which 7 tokens repeat, so that drafts are right."""
    return len(history) % 7


EVERY_OTHER = tuple(range(0, 80, 2))
AT_ONCE = (0,) * 40
TRACES = {
    "all at once": Trace(some_requests(40), AT_ONCE),
    "one every other step": Trace(some_requests(40), EVERY_OTHER),
    "planned in turn": Trace(some_requests(40), AT_ONCE, limits={"async_scheduling": False}),
    "few blocks, with preemption": Trace(some_requests(40), AT_ONCE, blocks=60),
    "prompts that share 40 tokens": Trace(some_requests(40, common=40), EVERY_OTHER),
    "drafts of n-grams": Trace(some_requests(20), (0,) * 20, drafts=3, next_token=repeating),
}


def environment() -> dict[str, str]:
    """Nothing that the figures depend on."""
    return {}


def measure() -> Mapping[str, float]:
    """Steps of each trace, and what they computed again."""
    found: dict[str, float] = {}
    for name, trace in TRACES.items():
        steps, tokens = _serve(trace)
        found[f"{name}: steps"] = steps
        found[f"{name}: tokens computed"] = tokens
    return found


def _serve(trace: Trace) -> tuple[int, int]:
    """Steps, and tokens of prompts and answers that they computed, also for a second time."""
    defaults = {"max_model_len": 160, "max_num_batched_tokens": 64, "max_num_seqs": 12, "block_size": 4}
    limits = Limits(**{**defaults, "max_drafts": trace.drafts, **trace.limits})
    layout = full_layout(limits.block_size)
    backend = FakeBackend(layout, num_blocks=trace.blocks, next_token=trace.next_token)
    drafter = Drafter(NgramProposer(1, 3), 50) if trace.drafts else None
    core = generation_core(backend, layout, limits, (trace.blocks,), partial(Scheduler, drafter=drafter))
    waiting = sorted(zip(trace.arrivals, trace.requests), key=lambda each: each[0], reverse=True)
    steps = tokens = 0
    execute = core._execute

    def count(plan: StepPlan) -> Any:
        nonlocal steps, tokens
        steps, tokens = steps + 1, tokens + len(plan.token_ids)
        return execute(plan)

    core._execute = count
    turn = 0
    while waiting or core.has_work:
        while waiting and waiting[-1][0] <= turn:
            core.add_request(waiting.pop()[1])
        if core.has_work:
            core.step()
        turn += 1
    return steps, tokens
