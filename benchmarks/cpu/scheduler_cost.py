"""Host cost of one decode step: schedule + update with many running requests and no model.

Prints one JSON line per mode. `planned_ahead`: each step is planned before the result of the one before is known.
`journal`: the calls are recorded, as an engine does for incident snapshots.

With `--drafts K` every sequence has K drafts in each step, all of which are accepted.

usage: python benchmarks/cpu/scheduler_cost.py [--running 256] [--steps 300] [--drafts 0]
"""

import argparse
import json
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
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import DraftContext, Drafter
from pagoda.common.engine.step import StepPlan, StepResult
from pagoda.common.models.caches import FullCache

LAYOUT = KvLayout((KvGroup(FullCache(3, 64), (0,)),), 16)
BLOCKS, PROMPT, MAX_TOKENS, WARM_STEPS = 40_000, 128, 2000, 20


class Constant:
    """Proposes token 7, which every step samples."""

    name = "constant"

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """Return as many as wanted."""
        return [[7] * context.num_tokens for context in contexts]


def make_scheduler(running: int, drafts: int) -> Scheduler:
    """A scheduler with `running` requests of random prompts in line."""
    limits = Limits(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=max(running, 8),
        block_size=LAYOUT.block_size,
        max_drafts=drafts,
    )
    kv = KvManager(
        LAYOUT,
        (BLOCKS,),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
    )
    scheduler = Scheduler(limits, kv, drafter=Drafter(Constant(), 1000))
    draw = random.Random(0)
    for index in range(running):
        prompt = [draw.randrange(1000) for _ in range(PROMPT)]
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


def result_of(plan: StepPlan) -> StepResult:
    """Token 7 wherever the plan samples, and for its drafts."""
    tokens = np.where(plan.samples, 7, -1).astype(np.int32)
    if plan.num_drafts is not None:
        columns = np.arange(1 + plan.num_drafts.max())
        tokens = np.where(columns <= plan.num_drafts[:, None], tokens[:, None], -1)
    return StepResult(plan.step, tokens)


def measure(
    running: int, steps: int, drafts: int, *, planned_ahead: bool, journal: bool
) -> dict[str, float | int | bool]:
    """Milliseconds per step."""
    scheduler = make_scheduler(running, drafts)
    record = Journal(scheduler, LAYOUT, (BLOCKS,)) if journal else None
    flights: list[StepPlan] = []
    schedule_ms, update_ms = [], []
    for _ in range(WARM_STEPS + steps):
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
    schedule_ms, update_ms = schedule_ms[WARM_STEPS:], update_ms[WARM_STEPS:]
    schedule, update = statistics.median(schedule_ms), statistics.median(update_ms)
    return {
        "running": running,
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


def main() -> None:
    """Measure both modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=0)
    args = parser.parse_args()
    for planned_ahead, journal in product((False, True), repeat=2):
        cost = measure(args.running, args.steps, args.drafts, planned_ahead=planned_ahead, journal=journal)
        json.dump(cost, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
