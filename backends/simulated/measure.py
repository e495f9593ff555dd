"""Measures the steps of a real backend, for step times that are fitted to them.

Steps of given shapes are plans over an empty KV cache, so that one with 100,000 tokens of context needs no prefill
before it: their cost depends on lengths alone. They cover what may come. Steps of requests that a real engine core
serves are what usually comes, beside the engine's thread. What that thread does around steps is measured by itself.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, cast

import numpy as np

from pagoda import __version__
from pagoda.backends.modules import CalibrationTarget
from pagoda.backends.simulated.calibration import (
    FORMAT,
    Calibration,
    MeasuredPlatform,
    MeasuredStep,
    fit,
    non_negative_least_squares,
    num_parameters,
    settings_of,
)
from pagoda.backends.simulated.device import HostCosts
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.backend import Backend, PendingResult
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import RowStart, StepPlan, StepResult, TokenMasks
from pagoda.common.engine.workload.drive import Clock, RealClock, TimedRequest, drive
from pagoda.common.models.mixers.caches import StateCache

CONTEXTS: Final = (64, 512, 2048, 8192, 32768)
"""Tokens that sequences of measured steps have in the cache."""

DECODES_BESIDE: Final = (4, 16, 64)
"""Sequences with one token beside the chunks of measured steps."""

WARM_UPS: Final = 2
LEAST_SECONDS: Final = 0.2
"""A step is measured for at least this long, short ones so more often."""

SERVED_CONCURRENCY: Final = (1, 2, 4, 8, 16, 32)
SERVED_PROMPTS: Final = (16, 256)
SERVED_OUTPUTS: Final = (8, 48)
"""Of the requests that a real engine core serves: how many at a time, and the range of their lengths."""

PAUSED_TOKENS: Final = 128
PAUSES: Final = (0.1, 0.2, 0.4, 0.8, 1.6) * 2
"""Seconds without a step, each before a step of PAUSED_TOKENS."""

HOST_SEQUENCES: Final = (1, 8, 32, 128)
HOST_STEPS: Final = 40


@dataclass(frozen=True, slots=True)
class TrialShape:
    """Lengths of the sequences of a step to measure."""

    singles: int  # Number of sequences with one token.
    context: int  # Tokens in the cache of each sequence, after the step.
    chunks: tuple[int, ...] = ()  # Tokens of each chunk of a prompt.
    before: int = 0  # Tokens in the cache before each chunk.
    ends: bool = True  # The chunks end their prompts: a token is sampled after each.
    drafts: int = 0  # Drafts of each sequence with one token, beside that token.

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.singles * (1 + self.drafts) + sum(self.chunks)

    @property
    def num_cached(self) -> int:
        """Tokens in the cache after the step, of all sequences."""
        return self.singles * self.context + sum(self.before + chunk for chunk in self.chunks)


def shapes(limits: Limits, cached_tokens: int) -> tuple[list[TrialShape], list[TrialShape]]:
    """Return the steps to measure without and with chunks, small first. `cached_tokens`: that the KV cache holds."""
    contexts = [context for context in CONTEXTS if context <= limits.max_model_len] or [limits.max_model_len]
    counts = _powers(1, limits.max_num_seqs)
    decodes = [TrialShape(count, context) for count in counts for context in contexts]
    if limits.max_drafts:
        widths = _powers(1, limits.max_drafts)
        decodes += [TrialShape(count, 512, drafts=width) for count in counts for width in widths if 512 in contexts]
    decodes = [shape for shape in decodes if shape.num_tokens <= limits.max_num_batched_tokens]
    mixed: list[TrialShape] = []
    for tokens in _powers(min(16, limits.max_num_batched_tokens), limits.max_num_batched_tokens):
        mixed += [TrialShape(0, 0, (tokens,), before) for before in (0, *contexts[1:])]
        mixed.append(TrialShape(0, 0, (tokens,), ends=False))
        mixed += [TrialShape(0, 0, (tokens // parts,) * parts) for parts in (2, 8)]
        mixed += [TrialShape(singles, contexts[:2][-1], (tokens - singles,)) for singles in DECODES_BESIDE]
    return _fitting(decodes, limits, cached_tokens), _fitting(mixed, limits, cached_tokens)


def _fitting(planned: Iterable[TrialShape], limits: Limits, cached_tokens: int) -> list[TrialShape]:
    """Return the shapes that the limits allow, small ones first."""
    fitting = {
        shape
        for shape in planned
        if min(shape.chunks, default=2) > 1
        and shape.singles + len(shape.chunks) <= limits.max_num_seqs
        and max(shape.chunks, default=0) + shape.before < limits.max_model_len
        and shape.num_cached + limits.block_size <= cached_tokens
    }
    return sorted(fitting, key=lambda shape: (shape.num_tokens, shape.num_cached, shape.ends))


def _powers(first: int, last: int) -> list[int]:
    """Return first, twice as much and so on, and last."""
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return sorted({*numbers, last})


def measured_step(load: StepLoad, seconds: float, count: int = 1) -> MeasuredStep:
    """Return a step of which `count` took `seconds` on average."""
    return MeasuredStep(
        load.query_lens.tolist(), load.context_lens.tolist(), load.num_sampled, load.num_drafts, seconds, count
    )


class StepMeasurer:
    """Runs steps of given shapes on a backend and returns their times."""

    def __init__(
        self,
        backend: Backend,
        layout: KvLayout,
        num_blocks: tuple[int, ...],
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._num_blocks = num_blocks
        self.clock = clock
        self._step = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of sequences that the KV cache holds, where the fewest fit."""
        groups = self._layout.groups_by_pool
        return min(
            (number - 1) // len(pool_groups) * self._layout.block_size
            for number, pool_groups in zip(self._num_blocks, groups)
            if not isinstance(pool_groups[0].spec, StateCache)
        )

    def measure(self, shape: TrialShape, repeats: int) -> MeasuredStep:
        """Return the mean time of a step that is run at least `repeats` times."""
        plan = self._plan(shape)
        self._run(plan, WARM_UPS, plan.starts)
        count = 0
        seconds = 0.0
        while count < repeats or seconds < LEAST_SECONDS:
            began = self.clock.now
            self._run(plan, repeats)
            count = count + repeats
            seconds = seconds + self.clock.now - began
        return measured_step(StepLoad.of(plan), seconds / count, count)

    def once(self, shape: TrialShape) -> float:
        """Return the seconds of one step."""
        plan = self._plan(shape)
        began = self.clock.now
        self._run(plan, 1)
        return self.clock.now - began

    def _run(self, plan: StepPlan, count: int, starts: tuple[RowStart, ...] = ()) -> None:
        """Run a step several times, the next one queued while one runs. `starts`: of the first."""
        pending: deque[PendingResult] = deque()
        for number in range(count):
            pending.append(self._backend.execute(replace(plan, starts=() if number else starts, step=self._step)))
            self._step += 1
            if len(pending) > 1:
                pending.popleft().result()
        while pending:
            pending.popleft().result()

    def _plan(self, shape: TrialShape) -> StepPlan:
        """Return a plan of the shape over blocks that no other sequence of it has."""
        width = 1 + shape.drafts
        query = np.array([width] * shape.singles + list(shape.chunks), np.int32)
        context = np.array([shape.context - width] * shape.singles + [shape.before] * len(shape.chunks), np.int32)
        samples = np.array([True] * shape.singles + [shape.ends] * len(shape.chunks), np.bool_)
        ends = context + query
        rows = np.arange(len(query), dtype=np.int32)
        rng = np.random.default_rng(0)
        starts = tuple(
            RowStart(row, rng.integers(0, 100, end + (0 if sampled else 1)).astype(np.int32), end, SamplingRules())
            for row, end, sampled in zip(rows.tolist(), ends.tolist(), samples.tolist())
        )
        query_start = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
        ids = np.concatenate(
            [start.token_ids[first : first + count] for start, first, count in zip(starts, context, query)]
        )
        return StepPlan(
            step=0,
            starts=starts,
            rows=rows,
            query_start=query_start,
            context=context,
            token_ids=ids,
            block_tables=self._tables(ends),
            samples=samples,
            num_drafts=np.where(query == width, shape.drafts, 0).astype(np.int32) if shape.drafts else None,
        )

    def _tables(self, ends: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return a block table [S, P] for each group, of distinct blocks."""
        pages = -(-ends // self._layout.block_size)
        free = [1] * len(self._num_blocks)
        tables = []
        for group in self._layout.groups:
            width = 1 if isinstance(group.spec, StateCache) else int(pages.max())
            table = np.zeros((len(ends), width), np.int32)
            for row, count in enumerate(np.minimum(pages, width).tolist()):
                table[row, :count] = np.arange(free[group.pool], free[group.pool] + count)
                free[group.pool] += count
            tables.append(table)
        return tuple(tables)


def measure_pause(measurer: StepMeasurer, limits: Limits) -> float:
    """Return by how much a step is longer that begins after a pause, in seconds: the median of pauses of PAUSES."""
    tokens = min(PAUSED_TOKENS, limits.max_num_batched_tokens, limits.max_model_len - 1)
    shape = TrialShape(0, 0, (tokens,), ends=False)
    later = []
    for pause in PAUSES:
        usual = measurer.measure(shape, 2).seconds
        measurer.clock.wait_until(measurer.clock.now + pause)
        later.append(measurer.once(shape) - usual)
    return max(0.0, statistics.median(later))


def measure_steps(
    measurer: StepMeasurer,
    limits: Limits,
    repeats: int,
    max_seconds: float,
    report_progress: Callable[[int, int], None],
) -> list[MeasuredStep]:
    """Return measured steps of all shapes that there is time for.

    `report_progress`: called with the numbers of measured and of all steps.
    """
    kinds = shapes(limits, measurer.cached_tokens)
    steps = []
    total = sum(map(len, kinds))
    number = 0
    for planned in kinds:
        began = measurer.clock.now
        for shape in planned:
            if measurer.clock.now - began > max_seconds / len(kinds):
                break
            steps.append(measurer.measure(shape, repeats))
            report_progress(number := number + 1, total)
    return steps


# Steps of an engine that serves.


class TimedBackend:
    """A backend in an engine: keeps each plan, and from when to when the device computed it."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self.capabilities = backend.capabilities
        self.plans: list[StepPlan] = []
        self.spans: list[tuple[float, float]] = []  # Start and end of each step whose result was fetched.

    def execute(self, plan: StepPlan) -> _TimedStep:
        self.plans.append(plan)
        return _TimedStep(self, self._clock.now, self._backend.execute(plan))

    def ended(self, submitted: float) -> None:
        """The oldest step has ended. It began when it was submitted, or when the one before ended."""
        before = self.spans[-1][1] if self.spans else submitted
        self.spans.append((max(submitted, before), self._clock.now))

    @property
    def steps(self) -> list[MeasuredStep]:
        """All steps that have ended; without drafts, whose true lengths the plan does not know."""
        return [
            measured_step(StepLoad.of(plan), end - begin)
            for plan, (begin, end) in zip(self.plans, self.spans)
            if plan.num_drafts is None
        ]


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """Implements common.backend.PendingResult."""

    backend: TimedBackend
    submitted: float
    pending: PendingResult

    def bind_masks(self, masks: TokenMasks) -> None:
        self.pending.bind_masks(masks)

    def result(self) -> StepResult:
        result = self.pending.result()
        self.backend.ended(self.submitted)
        return result


def serve_steps(
    backend: Backend,
    layout: KvLayout,
    limits: Limits,
    num_blocks: tuple[int, ...],
    concurrency: int,
    clock: Clock,
    seed: int = 0,
) -> list[MeasuredStep]:
    """Return the steps of an engine that serves `concurrency` requests of random lengths at a time.

    Prompts and outputs have different lengths, so requests start beside others that generate.
    """
    rng = np.random.default_rng((seed, concurrency))
    timed = TimedBackend(backend, clock)
    limits = replace(limits, max_drafts=0, device_drafts=False, max_loras=0, prefix_caching=False)
    core = generation_core(cast(Backend, timed), layout, limits, num_blocks)
    longest = limits.max_model_len // 2
    requests = []
    for number in range(2 * concurrency + 1):
        prompt = rng.integers(0, 100, min(longest, int(rng.integers(*SERVED_PROMPTS)))).tolist()
        output = min(longest, int(rng.integers(*SERVED_OUTPUTS)))
        rules = SamplingRules()
        requests.append(
            TimedRequest(
                0.0,
                EngineRequest(request_id=str(number), prompt_token_ids=prompt, rules=rules, max_tokens=output),
            )
        )
    drive(core, requests, clock, max_concurrency=concurrency)
    return timed.steps


# What the engine's thread does around steps.


class _Stopwatch:
    """A backend whose steps take no time, in its place: it notes when plans come and results are fetched."""

    def __init__(self, backend: Backend) -> None:
        self.capabilities = backend.capabilities
        self.planned = self.fetched = 0.0

    def execute(self, plan: StepPlan) -> _NoStep:
        self.planned = time.perf_counter()
        return _NoStep(self, plan)


@dataclass(frozen=True, slots=True)
class _NoStep:
    """Implements common.backend.PendingResult."""

    stopwatch: _Stopwatch
    plan: StepPlan

    def bind_masks(self, masks: TokenMasks) -> None:
        raise AssertionError("no request has a grammar")

    def result(self) -> StepResult:
        tokens = np.where(self.plan.samples, 7, -1).astype(np.int32)
        self.stopwatch.fetched = time.perf_counter()
        return StepResult(self.plan.step, tokens)


def measure_host(backend: Backend, layout: KvLayout, limits: Limits, num_blocks: tuple[int, ...]) -> HostCosts:
    """Return what the engine's thread does around steps, by a core whose device takes no time."""
    limits = replace(limits, async_scheduling=False, max_drafts=0, device_drafts=False, max_loras=0)
    rows = []
    for count in sorted({min(size, limits.max_num_seqs) for size in HOST_SEQUENCES}):
        rows.append((count, *_host_seconds(backend, layout, limits, num_blocks, count)))
    counts, plan, report, start = np.array(rows).T
    planning = _line(counts, plan)
    reporting = _line(counts, report)
    return HostCosts(
        plan_step=planning[0],
        plan_sequence=planning[1],
        start_request=max(0.0, float(start[-1])),  # The time of those starts whose first calls cost least.
        report_step=reporting[0],
        report_sequence=reporting[1],
    )


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the constant and the slope, neither negative, of the line that fits best."""
    constant, slope = non_negative_least_squares(np.stack([np.ones_like(x), x], 1) / y[:, None], np.ones(len(y)))
    return float(constant), float(slope)


def _host_seconds(
    backend: Backend, layout: KvLayout, limits: Limits, num_blocks: tuple[int, ...], count: int
) -> tuple[float, float, float]:
    """Return the seconds to plan and to report a step of `count` sequences, and to start each of them."""
    stopwatch = _Stopwatch(backend)
    core = generation_core(cast(Backend, stopwatch), layout, limits, num_blocks)
    for number in range(count):
        core.add_request(
            EngineRequest(
                request_id=str(number), prompt_token_ids=[number % 97, 1], rules=SamplingRules(), max_tokens=HOST_STEPS
            )
        )
    plan = []
    report = []
    while core.has_work:
        began = time.perf_counter()
        core.step()
        ended = time.perf_counter()
        plan.append(stopwatch.planned - began)
        report.append(ended - stopwatch.fetched)
    median = statistics.median(plan)
    return median, statistics.median(report), (plan[0] - median) / count


def calibrate(
    target: CalibrationTarget,
    repeats: int,
    max_seconds: float,
    done: Callable[[int, int], None],
    clock: Clock | None = None,
) -> Calibration:
    """Measure the steps of a backend and fit a model to them; see `SimulatorModule.calibrate`."""
    options = target.options
    memory = target.memory
    backend = target.backend
    clock = clock or RealClock()
    measurer = StepMeasurer(backend, options.layout, memory.num_blocks, clock)
    steps = measure_steps(measurer, options.limits, repeats, max_seconds, done)
    for concurrency in (size for size in SERVED_CONCURRENCY if size <= options.limits.max_num_seqs):
        steps += serve_steps(backend, options.layout, options.limits, memory.num_blocks, concurrency, clock)
    host = measure_host(backend, options.layout, options.limits, memory.num_blocks)
    return Calibration(
        format=FORMAT,
        model=target.model,
        parameters=num_parameters(options),
        backend=backend.capabilities.name,
        device=" ".join(dict.fromkeys(filter(None, (backend.capabilities.device, target.platform.device_name)))),
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        settings=settings_of(options),
        machine=MeasuredPlatform(target.platform.kind, target.platform.memory_bytes, target.platform.device_name),
        prefers_extents=backend.capabilities.prefers_extents,
        kv_cache_bytes=memory.kv_cache,
        block_bytes=list(memory.block_bytes),
        block_elements=[pool.block_elements for pool in options.layout.pools],
        weight_bytes=memory.weights,
        host=replace(host, after_pause=measure_pause(measurer, options.limits)),
        fit=fit(steps),
        steps=steps,
    )
