"""The simulator against reality: six workloads on the real engine of `reference`, and simulated.

The simulator knows what `pagoda calibrate` measures, steps by themselves and of other requests, not the workloads. Both
run the loop of a server's engine process (`common.engine.workload.drive`), without HTTP. Measurements and workloads
take turns, so that whatever else the machine does is in both. A run of each workload is repeated in the simulator with
arrivals by step instead of by time: all plans must be the same, block tables and token ids included.

`--clock processor`, for a machine that others use, measures seconds in which this process computes, in one thread, and
skips pauses between requests. Its latencies are those of an otherwise idle machine with one core.

`--replay` calibrates nothing: the simulator gets the measured time of each step by its number. What is left are the
errors of arrivals, scheduling, overlap and the engine's thread.

usage: python simulation.py --model MODEL [--rounds 3] [--scale 1.0] [--rate 1.0] [--clock real] [--max-seconds 600]
                            [--replay] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from pagoda.backends.modules import CalibrationTarget
from pagoda.backends.simulated.backend import SimulatedBackend
from pagoda.backends.simulated.calibration import MeasuredStep, error_of, fit, kind_of
from pagoda.backends.simulated.device import CacheBytes, HostCosts
from pagoda.backends.simulated.measure import (
    SERVED_CONCURRENCY,
    StepMeasurer,
    TimedBackend,
    TrialShape,
    measure_host,
    measure_pause,
    serve_steps,
    shapes,
)
from pagoda.backends.simulated.step_time import StepLoad, StepTimeModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import Platform
from pagoda.common.config.groups.bench.traffic import TrafficConfig
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.engine.workload.drive import (
    Clock,
    DrivenRun,
    RealClock,
    RequestTimes,
    TimedRequest,
    VirtualClock,
    drive,
)
from pagoda.server.bench.online.arrivals import arrival_times
from pagoda.server.cli.capacity.trace_file import timed_request
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.engine import build_for_calibration

LIMIT = 0.10
"""Relative error that means of latency and throughput may have."""


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens."""

    requests: int
    prompt: int
    output: int
    traffic: TrafficConfig
    spread: float = 0.0  # lengths are uniform in length * (1 -+ spread)
    shared: int = 0  # tokens that all prompts begin with, beside their own

    def timed(self, scale: float, rate: float, seed: int) -> list[TimedRequest]:
        rng = np.random.default_rng(seed)
        count = max(4, round(self.requests * scale))
        prefix = rng.integers(100, 40_000, self.shared).tolist()
        low, high = 1 - self.spread, 1 + self.spread
        prompts = rng.uniform(low, high, count) * self.prompt
        outputs = np.maximum(1, rng.uniform(low, high, count) * self.output)
        lengths = zip(arrival_times(self.traffic, count, rng) / rate, prompts, outputs)
        return [
            timed_request(
                str(number), at, prefix + rng.integers(100, 40_000, max(1, round(prompt))).tolist(), round(out)
            )
            for number, (at, prompt, out) in enumerate(lengths)
        ]


WORKLOADS = {
    "chat, Poisson": Workload(40, 128, 64, TrafficConfig(request_rate=2.0)),
    "long prompts, short answers": Workload(12, 1024, 16, TrafficConfig(request_rate=0.5)),
    "short prompts, 8 at a time": Workload(32, 32, 96, TrafficConfig(max_concurrency=8)),
    "burst of 32": Workload(32, 128, 32, TrafficConfig()),
    "varied lengths, bursty": Workload(24, 256, 48, TrafficConfig(request_rate=1.2, burstiness=0.3), spread=0.8),
    "shared prefix of 512": Workload(40, 32, 32, TrafficConfig(request_rate=3.0), shared=512),
}


class ProcessorClock:
    """Seconds that this process computes; waiting takes none. Others slow it down by their use of caches only."""

    def __init__(self) -> None:
        self._start, self._skipped = time.process_time(), 0.0

    @property
    def now(self) -> float:
        return time.process_time() - self._start + self._skipped

    def wait_until(self, when: float) -> None:
        self._skipped += max(0.0, when - self.now)


CLOCKS = {"real": RealClock, "processor": ProcessorClock}

PREFIX = Workload(40, 100, 8, TrafficConfig(), shared=900)
"""Prompts of 1,000 tokens, 90 % of which they share, all at once: with and without the prefix cache."""


@dataclass(frozen=True)
class Device:
    """The measured device, as the simulated backend wants it."""

    times: StepTimeModel
    host: HostCosts
    target: CalibrationTarget
    name: str = "measured"
    backend: str = "reference"

    @property
    def platform(self) -> Platform:
        return self.target.platform

    @property
    def prefers_extents(self) -> bool:
        return self.target.backend.capabilities.prefers_extents

    def step_time(self, options: BackendOptions) -> StepTimeModel:
        return self.times

    def cache_bytes(self, options: BackendOptions) -> CacheBytes:
        return CacheBytes(self.target.memory.kv_cache, self.target.memory.block_bytes)


class OneSecond:
    """Every step takes a second: the clock counts steps."""

    def seconds(self, load: StepLoad) -> float:
        return 1.0


class RecordedTimes:
    """Every step takes what the step of the same number took in the real engine."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._seconds = [end - begin for begin, end in spans]
        self._steps = 0

    def seconds(self, load: StepLoad) -> float:
        self._steps += 1
        return self._seconds[min(self._steps, len(self._seconds)) - 1]


@dataclass
class Measured:
    """A workload on the real engine."""

    requests: list[TimedRequest]
    run: DrivenRun
    plans: list[StepPlan]
    spans: list[tuple[float, float]]
    tokens: dict[str, list[int]]


def measure(target: CalibrationTarget, workload: Workload, requests: list[TimedRequest], clock: Clock) -> Measured:
    recording = TimedBackend(target.backend, clock)
    core = core_over(recording, target)
    tokens = record_tokens(core)
    run = drive(core, requests, clock, max_concurrency=workload.traffic.max_concurrency)
    return Measured(requests, run, recording.plans, recording.spans, tokens)


def one_thread(target: CalibrationTarget) -> None:
    """Compute in one thread, whatever other processes do, so that processor time is the time of the steps."""
    backend: Any = target.backend
    backend._threads.count, backend._threads.load = 1, SimpleNamespace(contended=False, others=0.0, update=lambda: None)


def core_over(backend: Any, target: CalibrationTarget) -> EngineCore:
    return generation_core(backend, target.options.layout, target.options.limits, target.memory.num_blocks)


def record_tokens(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    step = core.step

    def recorded() -> Any:
        outputs = step()
        for output in outputs.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return outputs

    core.step = recorded  # type: ignore[method-assign]
    return tokens


def simulate(device: Device, workload: Workload, requests: list[TimedRequest]) -> DrivenRun:
    clock = VirtualClock()
    core = core_over(SimulatedBackend(device.target.options, device, clock), device.target)
    return drive(core, requests, clock, max_concurrency=workload.traffic.max_concurrency)


def same_plans(device: Device, measured: Measured) -> int:
    """Number of plans, all of which are the same when simulated with arrivals by step. Raises SystemExit."""
    clock = VirtualClock()
    counting = replace(device, times=OneSecond(), host=HostCosts())
    recording = TimedBackend(SimulatedBackend(device.target.options, counting, clock), clock)
    steps = {each.request_id: float(each.steps_before) for each in measured.run.requests}
    arrivals = [
        timed_request(
            each.request.request_id,
            steps[each.request.request_id],
            each.request.prompt_token_ids,
            each.request.max_tokens,
            measured.tokens[each.request.request_id],
        )
        for each in measured.requests
    ]
    drive(core_over(recording, device.target), sorted(arrivals, key=lambda each: each.at), clock)
    if len(recording.plans) != len(measured.plans):
        raise SystemExit(f"{len(recording.plans)} simulated steps, {len(measured.plans)} measured")
    for one, other in zip(recording.plans, measured.plans):
        if described(one) != described(other):
            raise SystemExit(f"step {one.step} differs: {described(one)} {described(other)}")
    return len(measured.plans)


def described(plan: StepPlan) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in StepPlan.__dataclass_fields__}
    values["starts"] = tuple((each.row, each.num_prompt, each.token_ids.tolist()) for each in plan.starts)
    values["block_tables"] = [table.tolist() for table in plan.block_tables]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def figures(run: DrivenRun) -> dict[str, float]:
    """Means of latencies in milliseconds, and output tokens per second."""
    done: Sequence[RequestTimes] = run.requests
    assert not any(each.error for each in done)
    return {
        "ttft_ms": 1e3 * statistics.fmean(each.times[0] - each.start for each in done),
        "tpot_ms": 1e3
        * statistics.fmean(
            (each.times[-1] - each.times[0]) / (each.output_tokens - 1) for each in done if each.output_tokens > 1
        ),
        "tokens_per_s": sum(each.output_tokens for each in done) / run.seconds,
    }


def mean_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}


def averaged(steps: Sequence[tuple[TrialShape, MeasuredStep]]) -> list[MeasuredStep]:
    """One step of each shape, with the mean of its times."""
    by_shape: dict[TrialShape, list[MeasuredStep]] = {}
    for shape, step in steps:
        by_shape.setdefault(shape, []).append(step)
    return [
        MeasuredStep(
            own[0].query_lens,
            own[0].context_lens,
            own[0].num_sampled,
            own[0].num_drafts,
            sum(step.seconds * step.count for step in own) / sum(step.count for step in own),
            sum(step.count for step in own),
        )
        for own in by_shape.values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--rate", type=float, default=1.0, help="of the request rates")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="real")
    parser.add_argument("--replay", action="store_true", help="the simulator knows how long each step took")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="no round begins that would end later")
    parser.add_argument("--output")
    args = parser.parse_args()
    began = time.perf_counter()
    config = EngineArgs(args.model, backend="reference", max_model_len=1536).create_engine_config()
    target = build_for_calibration(config, {})
    if args.replay:
        report = {
            "model": target.model,
            "scale": args.scale,
            "rate": args.rate,
            "workloads": replay(target, args.scale, args.rate),
        }
        target.backend.close()
        print(json.dumps(report, indent=1))
        if args.output:
            Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
        return
    measurer = StepMeasurer(target.backend, target.options.layout, target.memory.num_blocks, CLOCKS[args.clock]())
    if args.clock == "processor":
        one_thread(target)
    every = [shape for kind in shapes(target.options.limits, 12_000) for shape in kind]
    np.random.default_rng(0).shuffle(every)  # type: ignore[arg-type]
    parts = [every[number :: len(WORKLOADS)] for number in range(len(WORKLOADS))]
    steps: list[tuple[TrialShape, MeasuredStep]] = []
    served: list[MeasuredStep] = []
    runs: dict[str, list[Measured]] = {name: [] for name in WORKLOADS}
    loads, pauses = [], []
    for number in range(args.rounds):
        spent = time.perf_counter() - began
        if number and spent * (number + 1) / number > args.max_seconds:
            break
        for part, concurrency, (name, workload) in zip(parts, SERVED_CONCURRENCY, WORKLOADS.items()):
            steps += [(shape, measurer.measure(shape, 2)) for shape in part]
            pauses.append(measure_pause(measurer, target.options.limits))
            served += serve_steps(
                target.backend,
                target.options.layout,
                target.options.limits,
                target.memory.num_blocks,
                concurrency,
                CLOCKS[args.clock](),
                seed=number,
            )
            requests = workload.timed(args.scale, args.rate, seed=number)
            runs[name].append(measure(target, workload, requests, CLOCKS[args.clock]()))
            loads.append(os.getloadavg()[0])
            print(f"{time.perf_counter() - began:.0f} s, load {loads[-1]:.1f}: {name}", file=sys.stderr, flush=True)
    host = measure_host(target.backend, target.options.layout, target.options.limits, target.memory.num_blocks)
    host = replace(host, after_pause=statistics.median(pauses))
    fitted = fit([*averaged(steps), *served])
    device = Device(fitted, host, target)
    results: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        measured = mean_of([figures(each.run) for each in runs[name]])
        simulated = mean_of([figures(simulate(device, workload, each.requests)) for each in runs[name]])
        errors = {key: simulated[key] / measured[key] - 1 for key in measured}
        results[name] = {
            "measured": measured,
            "simulated": simulated,
            "error": errors,
            "within_10_percent": all(abs(error) <= LIMIT for error in errors.values()),
            "steps_with_equal_plans": sum(same_plans(device, each) for each in runs[name]),
            "step_time_bias": bias(device, runs[name]),
            "rounds": [figures(each.run) for each in runs[name]],
        }
    prefixes = prefix_cache(device, args.scale, args.clock)
    target.backend.close()
    report = {
        "model": target.model,
        "load_average": {"least": min(loads), "mean": statistics.fmean(loads), "most": max(loads)},
        "rounds": len(next(iter(runs.values()))),
        "scale": args.scale,
        "rate": args.rate,
        "clock": args.clock,
        "seconds": time.perf_counter() - began,
        "fit_error": {kind: str(error) for kind, error in fitted.errors.items()},
        "host_ms": {name: 1e3 * getattr(host, name) for name in HostCosts.__dataclass_fields__},
        "prefix_cache_requests_per_s": prefixes,
        "workloads": results,
        "tables": msgspec.to_builtins(fitted.tables),
        "fit_error_of_served_steps": {
            kind: str(error_of(table, [step for step in served if kind_of(step.load) == kind]))
            for kind, table in fitted.tables.items()
        },
    }
    show(report)
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def prefix_cache(device: Device, scale: float, clock: str) -> dict[str, Any]:
    """Requests per second with the prefix cache over those without, measured and simulated."""
    rates: dict[str, dict[bool, float]] = {"measured": {}, "simulated": {}}
    requests = PREFIX.timed(scale, 1.0, seed=0)
    for caching in (False, True):
        options = device.target.options
        target = replace(
            device.target, options=replace(options, limits=replace(options.limits, prefix_caching=caching))
        )
        rates["measured"][caching] = len(requests) / measure(target, PREFIX, requests, CLOCKS[clock]()).run.seconds
        rates["simulated"][caching] = len(requests) / simulate(replace(device, target=target), PREFIX, requests).seconds
    return {
        name: {"without": own[False], "with": own[True], "ratio": own[True] / own[False]} for name, own in rates.items()
    }


def replay(target: CalibrationTarget, scale: float, rate: float) -> dict[str, Any]:
    """Errors of the simulator that knows how long each step took: those of everything but the model of step times."""
    host = measure_host(target.backend, target.options.layout, target.options.limits, target.memory.num_blocks)
    results = {}
    for name, workload in WORKLOADS.items():
        requests = workload.timed(scale, rate, seed=0)
        real = measure(target, workload, requests, RealClock())
        device = Device(RecordedTimes(real.spans), host, target)
        measured, simulated = figures(real.run), figures(simulate(device, workload, requests))
        results[name] = {
            "measured": measured,
            "simulated": simulated,
            "error": {key: simulated[key] / measured[key] - 1 for key in measured},
            "steps_with_equal_plans": same_plans(device, real),
            "load": os.getloadavg()[0],
        }
        print(f"{name}: {results[name]['error']}", file=sys.stderr, flush=True)
    return results


def bias(device: Device, runs: Sequence[Measured]) -> float:
    """Relative error of the time of all steps of a workload, as they ran in the engine."""
    loads = [StepLoad.of(plan) for each in runs for plan in each.plans]
    measured = sum(end - start for each in runs for start, end in each.spans)
    return sum(map(device.times.seconds, loads)) / measured - 1


def show(report: dict[str, Any]) -> None:
    print(json.dumps({key: value for key, value in report.items() if key not in ("workloads", "tables")}, indent=1))
    print(f"{'workload':<30}{'TTFT ms':>18}{'TPOT ms':>18}{'tokens/s':>18}  errors, step bias, equal plans")
    for name, row in report["workloads"].items():
        cells = "".join(
            f"{row['measured'][key]:>9.1f}{row['simulated'][key]:>9.1f}"
            for key in ("ttft_ms", "tpot_ms", "tokens_per_s")
        )
        errors = ", ".join(f"{error:+.1%}" for error in row["error"].values())
        print(f"{name:<30}{cells}  {errors}; {row['step_time_bias']:+.1%}; {row['steps_with_equal_plans']}")


if __name__ == "__main__":
    main()
