"""Host cost of one decode step: schedule + update with many running requests and no model.

Prints one JSON line per mode. `planned_ahead`: each step is planned before the result of the one before is known.
`journal`: the calls are recorded, as an engine does for incident snapshots.

With `--drafts K` every sequence has K drafts in each step, all of which are accepted. With `--growth` it measures how
the cost grows with running requests and with context instead, planned ahead and recorded as in an engine, and prints a
line: times and calls of functions per step, the exponents fitted to them (1 is linear), and the time per further
request or token of context.

usage: python benchmarks/cpu/scheduler_cost.py [--running 256] [--steps 300] [--drafts 0] [--growth]
"""

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.incident.journal import Journal
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import DraftContext, Drafter
from pagoda.common.engine.steps.contract import StepPlan, StepResult
from pagoda.common.models.mixers.caches import FullCache

LAYOUT = KvLayout((KvGroup(FullCache(3, 64), (0,)),), 16)
PROMPT, MAX_TOKENS, WARM_STEPS = 128, 2000, 20
RUNNING, CONTEXTS = (64, 256, 1024, 4096), (1 << 10, 1 << 15, 1 << 17)
"""Sizes of the two series of --growth."""

AT_CONTEXT = 16
"""Running requests of the second."""


class Constant:
    """Proposes token 7, which every step samples."""

    name = "constant"

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """Return as many as wanted."""
        return [[7] * context.num_tokens for context in contexts]


def make_scheduler(running: int, drafts: int, context: int = PROMPT) -> Scheduler:
    """A scheduler with `running` requests of random prompts of `context` tokens in line."""
    limits = Limits(
        max_model_len=context + MAX_TOKENS + 1,
        max_num_batched_tokens=8192,
        max_num_seqs=max(running, 8),
        block_size=LAYOUT.block_size,
        max_drafts=drafts,
    )
    kv = KvManager(
        LAYOUT,
        (num_blocks(running, context),),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
    )
    scheduler = Scheduler(limits, kv, drafter=Drafter(Constant(), 1000))
    draw = random.Random(0)
    for index in range(running):
        prompt = [draw.randrange(1000) for _ in range(context)]
        scheduler.add(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                rules=SamplingRules(),
                max_tokens=MAX_TOKENS,
                stop_token_ids=frozenset({2}),
            )
        )
    return scheduler


def num_blocks(running: int, context: int) -> int:
    """Enough for all of them to the end of the measurement."""
    return 1 + running * (1 + (context + MAX_TOKENS) // LAYOUT.block_size)


def result_of(plan: StepPlan) -> StepResult:
    """Token 7 wherever the plan samples, and for its drafts."""
    tokens = np.where(plan.samples, 7, -1).astype(np.int32)
    if plan.num_drafts is not None:
        columns = np.arange(1 + plan.num_drafts.max())
        tokens = np.where(columns <= plan.num_drafts[:, None], tokens[:, None], -1)
    return StepResult(plan.step, tokens)


def measure(
    running: int, steps: int, drafts: int, *, planned_ahead: bool, journal: bool, context: int = PROMPT
) -> dict[str, float | int | bool]:
    """Milliseconds per step, once all requests have computed their prompts."""
    scheduler = make_scheduler(running, drafts, context)
    blocks = num_blocks(running, context)
    record = Journal(scheduler, LAYOUT, (blocks,)) if journal else None
    flights: list[StepPlan] = []
    schedule_ms, update_ms = [], []
    prefills = -(-running * context // scheduler.limits.max_num_batched_tokens)
    for _ in range(prefills + WARM_STEPS + steps):
        begin = time.perf_counter()
        plan = scheduler.schedule() if record is None else record.schedule(scheduler.schedule)
        planned = time.perf_counter()
        assert plan is not None
        flights.append(plan)
        schedule_ms.append((planned - begin) * 1e3)
        if len(flights) <= planned_ahead:
            continue
        oldest = flights.pop(0)
        result = result_of(oldest)
        begin = time.perf_counter()
        if record is None:
            scheduler.update(oldest, result)
        else:
            record.update(oldest, partial(scheduler.update, oldest, result))
        update_ms.append((time.perf_counter() - begin) * 1e3)
    schedule_ms, update_ms = schedule_ms[prefills + WARM_STEPS :], update_ms[prefills + WARM_STEPS :]
    schedule, update = statistics.median(schedule_ms), statistics.median(update_ms)
    return {
        "running": running,
        "context": context,
        "drafts": drafts,
        "planned_ahead": planned_ahead,
        "journal": journal,
        "schedule_ms": round(schedule, 3),
        "update_ms": round(update, 3),
        "sum_ms": round(schedule + update, 3),
        "sum_p10_ms": round(sum(statistics.quantiles(each, n=10)[0] for each in (schedule_ms, update_ms)), 3),
        "schedule_max_ms": round(max(schedule_ms), 3),
        "sum_mean_ms": round(statistics.fmean(schedule_ms) + statistics.fmean(update_ms), 3),
    }


def calls_per_step(running: int, context: int) -> float:
    """Calls of functions in a step of decodes: what the scheduler does, whatever the machine."""
    scheduler = make_scheduler(running, 0, context)
    profile = cProfile.Profile()
    prefills = -(-running * context // scheduler.limits.max_num_batched_tokens)
    for number in range(prefills + 2 * WARM_STEPS):
        if number == prefills + WARM_STEPS:
            profile.enable()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, result_of(plan))
    profile.disable()
    return float(pstats.Stats(profile).total_calls) / WARM_STEPS  # type: ignore[attr-defined]


def growth(steps: int) -> dict[str, object]:
    """How the cost grows with running requests and with context."""

    def series(sizes: Sequence[int], sized: Sequence[tuple[int, int]]) -> dict[str, object]:
        rows = [
            measure(running, steps, 0, planned_ahead=True, journal=True, context=context) for running, context in sized
        ]
        costs = np.array([float(row["sum_p10_ms"]) for row in rows])
        exponent = np.polyfit(np.log(sizes), np.log(costs), 1)[0]
        slope = np.polyfit(sizes, costs, 1)[0]
        calls = np.array([calls_per_step(*each) for each in sized])
        return {
            "sizes": list(sizes),
            "calls": calls.tolist(),
            "exponent_of_calls": round(float(np.polyfit(np.log(sizes), np.log(calls), 1)[0]), 3),
            "p10_ms": costs.tolist(),
            "median_ms": [row["sum_ms"] for row in rows],
            "exponent": round(float(exponent), 3),
            "us_per_unit": round(float(slope) * 1e3, 5),
        }

    return {
        "by_running": series(RUNNING, [(size, PROMPT) for size in RUNNING]),
        "by_context": {"running": AT_CONTEXT, **series(CONTEXTS, [(AT_CONTEXT, size) for size in CONTEXTS])},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure both modes, or the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--growth", action="store_true")
    args = parser.parse_args()
    if args.growth:
        print(json.dumps(growth(args.steps)))
        return
    for planned_ahead, journal in product((False, True), repeat=2):
        cost = measure(args.running, args.steps, args.drafts, planned_ahead=planned_ahead, journal=journal)
        json.dump(cost, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
