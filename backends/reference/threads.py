"""Compute threads beside other processes: how many run an operation together, and steps that are divided among them.

Threads that share an operation wait for each other hundreds of times per step, each time for one that may have lost its
core. Beside busy processes the sequences of a large step are divided instead: each thread computes its part of all
layers and the head, and waits once. There are more of these threads than cores, since the kernel divides time among
threads. A small step runs on as many threads as there are cores left.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
import torch

from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.contract import Int32, StepPlan
from pagoda.common.models.mixers.caches import StateCache

ResultT = TypeVar("ResultT")
Clock = Callable[[], tuple[float, float, float]]
"""Returns seconds of wall time, of this process's threads, and of all cores that it may use."""

INTERVAL: Final = 0.25
"""Seconds between two measurements of the load."""

BUSY: Final = 0.5
CALM: Final = 0.4
"""Cores that other processes keep busy, from which on threads work apart, and below which they work together again."""

PARTS_PER_THREAD: Final = 2
"""With two cores and one busy process two threads get 1.3 cores, four 1.6."""

TOKENS_PER_PART: Final = 16
"""At least; each part reads all weights."""

_TOKEN_COST: Final = 1000
"""Of the products of a token, in keys that attention reads."""

_LARGEST_SHARE: Final = 1.3
"""Cost of the largest part in those of equal parts, up to which a step is divided."""

logger = logging.getLogger(__name__)


def read_clock() -> tuple[float, float, float]:
    """See Clock. Raises OSError without /proc/stat."""
    own = os.times()
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with open("/proc/stat") as lines:
        fields = [line.split() for line in lines if line.startswith("cpu")]
    ticks = sum(sum(map(int, row[1:4])) + sum(map(int, row[6:9])) for row in fields if row[0] in names)
    return time.monotonic(), own.user + own.system, ticks / os.sysconf("SC_CLK_TCK")


class CoreLoad:
    """How many cores other processes keep busy."""

    def __init__(self, clock: Clock = read_clock) -> None:
        self._clock = clock
        self._before = self._read()
        self.others = 0.0
        self.contended = False

    def update(self) -> None:
        """Measure again if the last measurement is old."""
        if self._before is None or time.monotonic() - self._before[0] < INTERVAL:
            return
        now = self._read()
        if now is None:
            return
        wall, own, cores = (after - before for after, before in zip(now, self._before))
        self._before = now
        self.others = max(0.0, (cores - own) / max(wall, 1e-3))
        contended = self.others > (CALM if self.contended else BUSY)
        if contended != self.contended:
            how = "apart" if contended else "together"
            logger.debug("other processes use %.1f cores: threads work %s", self.others, how)
        self.contended = contended

    def _read(self) -> tuple[float, float, float] | None:
        try:
            return self._clock()
        except (OSError, ValueError):
            return None


class ComputeThreads:
    """The threads of one backend. Its methods are called by the thread that runs the steps."""

    def __init__(self, count: int, load: CoreLoad | None = None) -> None:
        self.count = count
        self.load = load or CoreLoad()
        self._apart: ThreadPoolExecutor | None = None

    @property
    def parts(self) -> int:
        """Into how many parts a step is divided."""
        return PARTS_PER_THREAD * self.count

    def together(self) -> None:
        """Set the number of threads that share an operation."""
        self.load.update()
        free = len(os.sched_getaffinity(0)) - self.load.others
        count = min(self.count, max(1, round(free))) if self.load.contended else self.count
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    def map(self, run: Callable[[StepPlan], ResultT], plans: Sequence[StepPlan]) -> list[ResultT]:
        """Run each plan on a thread of its own. Raises what the first one that failed raised."""
        if self._apart is None:
            self._apart = ThreadPoolExecutor(
                self.parts, "pagoda-part", initializer=torch.set_num_threads, initargs=(1,)
            )
        return list(self._apart.map(run, plans))

    def close(self) -> None:
        """End the threads."""
        if self._apart is not None:
            self._apart.shutdown()


def divide(plan: StepPlan, parts: int, layout: KvLayout) -> list[Int32]:
    """Return the sequences of each part of a step, of about equal cost; fewer than two parts: do not divide it."""
    lengths = np.diff(plan.query_start)
    parts = min(parts, plan.num_tokens // TOKENS_PER_PART)
    if parts < 2 or _share_new_blocks(plan, lengths, layout):
        return []
    costs = (lengths * (_TOKEN_COST + plan.context + lengths // 2)).astype(np.int64)
    owners = np.zeros(len(costs), np.int32)
    totals = [0] * parts
    for index in np.argsort(-costs, kind="stable").tolist():
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += int(costs[index])
    if max(totals) * parts > _LARGEST_SHARE * sum(totals):
        return []
    return [np.flatnonzero(owners == part).astype(np.int32) for part in range(parts)]


def _share_new_blocks(plan: StepPlan, lengths: Int32, layout: KvLayout) -> bool:
    """Return whether a sequence attends to a block that another one writes in this step."""
    first = plan.context // layout.block_size
    last = (plan.context + lengths - 1) // layout.block_size
    for group, table in zip(layout.groups, plan.block_tables):
        if isinstance(group.spec, StateCache):
            continue
        pages = np.arange(table.shape[1])
        written = (pages >= first[:, None]) & (pages <= last[:, None])
        new = np.zeros(int(table.max()) + 1, np.bool_)
        new[table[written]] = True
        if new[table[pages < first[:, None]]].any():
            return True
    return False


def part_of(plan: StepPlan, sequences: Int32) -> tuple[StepPlan, Int32]:
    """Return the step of some sequences alone, and the indices of its tokens."""
    lengths = np.diff(plan.query_start)[sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.arange(starts[-1]) + np.repeat(plan.query_start[sequences] - starts[:-1], lengths)
    part = replace(
        plan,
        starts=(),
        rows=plan.rows[sequences],
        query_start=starts,
        context=plan.context[sequences],
        token_ids=plan.token_ids[tokens],
        block_tables=tuple(np.ascontiguousarray(table[sequences]) for table in plan.block_tables),
        samples=plan.samples[sequences],
        num_drafts=None if plan.num_drafts is None else plan.num_drafts[sequences],
        adapter_slots=None if plan.adapter_slots is None else plan.adapter_slots[sequences],
    )
    return part, tokens
