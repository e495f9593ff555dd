"""`pagoda plan`: which accelerators serve a workload within its latency targets, how many, and with which limits.

For each accelerator and tensor-parallel size a search over limits and request rates (backends/simulated/planner.py);
the best of each is then run by the real scheduler on a virtual clock, at a lower rate if that misses the targets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.backends.modules import PlannerModule
from pagoda.backends.registry import load_planner
from pagoda.common.config.commands import COMMAND_SETTINGS, PlanConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ResolvedSettings, build
from pagoda.common.engine.workload.capacity import EnginePlan, LoadMeasures, PlannedLoad, ServiceTarget
from pagoda.common.engine.workload.drive import TimedRequest, VirtualClock, drive
from pagoda.common.errors import ConfigError, ModelError
from pagoda.server.bench.offline.engine import write_results
from pagoda.server.cli.capacity.planned_load import parse_target, parse_workload
from pagoda.server.cli.capacity.simulate import simulated_config
from pagoda.server.cli.capacity.trace_file import timed_request
from pagoda.server.settings.flags import resolve_settings
from pagoda.server.settings.resolve import open_model
from pagoda.server.startup.engine import build_simulation, simulation_options

SETTINGS: Final = COMMAND_SETTINGS["plan"]

SEQS: Final = (256, 64, 1024)
TOKENS: Final = (2048, 512, 8192)
"""Values of --max-num-seqs and --max-num-batched-tokens that are tried."""

TENSOR_PARALLEL: Final = (1, 2, 4, 8)

_LOWERED: Final = 0.95
_LOWERINGS: Final = 5
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """What one accelerator, with one tensor-parallel size, would take."""

    hardware: str
    tensor_parallel: int
    plan: EnginePlan | None = None  # None: the model does not fit.
    measures: LoadMeasures | None = None  # Measures by the scheduler, at the rate of one replica.
    rate: float = 0.0  # Requests per second that one replica serves within the target, by the scheduler.
    devices_per_chip: int = 1
    replicas: int | None = None  # Number of replicas for the asked rate.
    cluster: LoadMeasures | None = None  # Measures of all replicas at that rate.
    price: float | None = None  # Price of all chips per hour.
    why: str = ""  # Why it does not fit, or misses the target.

    @property
    def chips(self) -> int:
        """Chips of all replicas; replicas may share one."""
        return -(-self.tensor_parallel * (self.replicas or 1) // self.devices_per_chip)

    @property
    def order(self) -> tuple[float, ...]:
        """Those that serve the load come first, of these the one with the fewest chips for it."""
        usable = self.plan is not None and not self.why
        alone = self.tensor_parallel / self.devices_per_chip / max(self.rate, 1e-9)
        per_rate = alone if self.replicas is None else self.chips
        return (not usable, per_rate, self.chips)

    def as_json(self) -> dict[str, Any]:
        """Return JSON data."""
        row: dict[str, Any] = {"hardware": self.hardware, "tensor_parallel_size": self.tensor_parallel}
        if self.why:
            row["why_not"] = self.why
        if self.plan is None or self.measures is None:
            return row
        limits = self.plan.limits
        memory = self.plan.memory
        state_bytes, states = self.plan.states
        return row | {
            "devices_per_chip": self.devices_per_chip,
            "replicas": self.replicas,
            "chips": self.chips,
            "price_per_hour": self.price,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "weight_bytes": memory.weights,
            "kv_cache_bytes": memory.kv_cache,
            "kv_cache_tokens": self.plan.cache_tokens,
            "recurrent_state_bytes": state_bytes,
            "recurrent_states": states,
            "requests_per_second_per_replica": self.rate,
            "replica": self.measures.as_json(),
            "cluster": None if self.cluster is None else self.cluster.as_json(),
        }


def run(args: argparse.Namespace) -> int:
    """Plan and print the table. Returns 0, or 1 if nothing serves the load. Raises ConfigError or ModelError."""
    settings = resolve_settings(args, SETTINGS)
    plan = build(PlanConfig, settings.values)
    config = simulated_config(settings)  # This raises what is wrong whatever the hardware.
    if config.extension.speculative is not None and config.simulation.acceptance_rate is None:
        raise ConfigError("--acceptance-rate", "required with --speculative-config: how often drafts are right, as 0.7")
    open_model(config, weights=False)  # A model that cannot be read is one error, not one of each accelerator.
    planner = load_planner()
    names = _hardware(settings.values["hardware"], planner)
    target = ServiceTarget(parse_target(plan.slo), plan.slo_percentile)
    timed = plan.request_rate is not None or bool(target.latencies)
    load = parse_workload(plan.workload, plan.num_prompts, settings.values["seed"] or 0, timed=timed)
    planning = Planning(settings, plan, load, target, planner, _prices(plan.price))
    rows = sorted((row for name in names for row in planning.rows(name)), key=lambda row: row.order)
    notes = planning.assumptions([name for name in names if any(row.hardware == name and row.plan for row in rows)])
    print("\n".join([*table(rows, plan, target, load), "", "assumed:", *(f"  {note}" for note in notes)]))
    results = {"assumptions": notes, "rows": [row.as_json() for row in rows]}
    write_results(plan.output_json, results)
    return 0 if any(row.plan is not None and not row.why for row in rows) else 1


def _hardware(value: str | None, planner: PlannerModule) -> Sequence[str]:
    if value is None:
        return planner.chip_names()
    names = [name.strip().lower() for name in value.split(",") if name.strip()]
    for name in names:
        planner.devices_per_chip(name)
    return list(dict.fromkeys(names))


def _prices(path: str | None) -> Mapping[str, float]:
    if path is None:
        return {}
    try:
        prices = json.loads(Path(path).read_text(encoding="utf-8"))
        return {str(name).lower(): float(price) for name, price in prices.items()}
    except OSError as error:
        raise ConfigError("--price", f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            "--price", f'{path} is not a JSON object such as {{"h100": 2.5}}, per chip and hour'
        ) from None


@dataclass(frozen=True, slots=True)
class Planning:
    """The rows of a plan."""

    settings: ResolvedSettings
    plan: PlanConfig
    load: PlannedLoad
    target: ServiceTarget
    planner: PlannerModule
    prices: Mapping[str, float]

    def rows(self, hardware: str) -> Iterator[Row]:
        """Yield a row for each tensor-parallel size of an accelerator, up to the first that needs more chips."""
        sizes: Sequence[int] = TENSOR_PARALLEL
        if "tensor_parallel_size" in self.settings.sources:
            sizes = (self.settings.values["tensor_parallel_size"],)
        best: Row | None = None
        for size in sizes:
            row = self._row(hardware, size)
            last = size == sizes[-1]
            if row.plan is None and not last:
                continue  # More devices may fit.
            yield row
            if best is not None and row.order > best.order:
                return
            best = row

    def _row(self, hardware: str, size: int) -> Row:
        row = Row(hardware, size, devices_per_chip=self.planner.devices_per_chip(hardware))
        try:
            config = self._config(hardware, size)
            options = simulation_options(config, self.settings.sources)
            plan = self.planner.best_limits(
                options,
                self.load,
                self.target,
                self._candidates("max_num_seqs"),
                self._candidates("max_num_batched_tokens"),
            )
        except (ConfigError, ModelError) as error:
            return replace(row, why=str(error))
        if plan.missed:
            measured = plan.measures.percentile
            misses = ", ".join(f"{name} {1e3 * measured[name]:.0f} ms" for name in plan.missed)
            return replace(row, plan=plan, measures=plan.measures, why=f"a request alone takes {misses}")
        rate, measures = self._run(config, plan)
        row = replace(row, plan=plan, rate=rate, measures=measures)
        if not rate:
            return replace(row, why="the scheduler does not meet the target at the rate that was found")
        if self.plan.request_rate is not None:
            plan = replace(plan, rate=rate)
            replicas, cluster = self.planner.replicas_for(options, plan, self.load, self.target, self.plan.request_rate)
            row = replace(row, replicas=replicas, cluster=cluster)
        if hardware in self.prices:
            row = replace(row, price=self.prices[hardware] * row.chips)
        return row

    def _config(self, hardware: str, size: int) -> EngineConfig:
        values = {**self.settings.values, "hardware": hardware, "tensor_parallel_size": size}
        config = simulated_config(replace(self.settings, values=values))
        if config.model.max_model_len is None:
            config = replace(config, model=replace(config.model, max_model_len=self.load.longest))
        return config

    def _candidates(self, name: str) -> Sequence[int]:
        if name in self.settings.sources:
            return (self.settings.values[name],)
        return SEQS if name == "max_num_seqs" else TOKENS

    def _run(self, config: EngineConfig, plan: EnginePlan) -> tuple[float, LoadMeasures]:
        """Run the load by the scheduler. Returns the rate within the target, 0 if none was found near, and measures."""
        limits = plan.limits
        scheduler = replace(
            config.scheduler,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        config = replace(config, scheduler=scheduler)
        rate = plan.rate
        if rate is None:
            measures = self._measured(config, 1.0)
            return measures.requests_per_second, measures
        for _ in range(_LOWERINGS):
            measures = self._measured(config, rate)
            if self.target.is_met(measures):
                return rate, measures
            rate *= _LOWERED
        return 0.0, measures

    def _measured(self, config: EngineConfig, rate: float) -> LoadMeasures:
        clock = VirtualClock()
        built = build_simulation(config, self.settings.sources, clock)
        arrived = self.load.arrive(rate)
        times = drive(built.core, self._requests(arrived, built.info.vocab_size), clock).requests
        if errors := [request_times.error for request_times in times if request_times.error]:
            raise ConfigError("--workload", f"{len(errors)} requests are refused, the first with: {errors[0]}")
        return self.target.measure(
            self.load,
            arrived,
            np.array([request_times.times[0] for request_times in times]),
            np.array([request_times.times[-1] for request_times in times]),
        )

    def _requests(self, arrived: np.ndarray, vocab: int) -> list[TimedRequest]:
        """Return the requests, with prompts of made-up tokens that share their prefixes."""
        requests = []
        for index, arrival in enumerate(arrived.tolist()):
            tokens = np.random.default_rng((1, index)).integers(0, vocab, self.load.prompts[index])
            if self.load.prefixes and (number := self.load.prefixes[index]) >= 0:
                length = self.load.prefix_lens[index]
                tokens[:length] = np.random.default_rng((2, number)).integers(0, vocab, length)[: len(tokens)]
            requests.append(timed_request(str(index), arrival, tokens.tolist(), self.load.outputs[index]))
        return requests

    def assumptions(self, names: Sequence[str]) -> list[str]:
        """Return what the plan assumes, one sentence each."""
        load = self.load
        requests = len(load.prompts)
        arrive = "arriving at random (Poisson)" if load.arrivals else "all arriving at once"
        return [
            f"{requests} requests, {arrive}; prompts of {np.mean(load.prompts):.0f} tokens and outputs of "
            f"{np.mean(load.outputs):.0f} on average, the longest {load.longest} together",
            "steps by roofline, planned by the scheduler of `serve`; no time for HTTP, tokenising and the network",
            *map(self.planner.assumptions, names),
        ]


# The table.


def table(rows: Sequence[Row], plan: PlanConfig, target: ServiceTarget, load: PlannedLoad) -> Iterator[str]:
    """Yield the lines of the table, and what fits nowhere."""
    percentile = f"p{target.percentile:g}"
    cells = [_headings(plan, percentile, timed=bool(load.arrivals))]
    cells += [
        _cells(row, row.plan, row.measures, plan, timed=bool(load.arrivals))
        for row in rows
        if row.plan is not None and row.measures is not None and not row.why
    ]
    if len(cells) > 1:
        widths = [max(map(len, column)) for column in zip(*cells)]
        for line in cells:
            yield "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            causes.setdefault(row.why, []).append(f"{row.hardware} x {row.tensor_parallel}")
    for why, configurations in causes.items():
        yield f"{', '.join(configurations)}: {why}"


def _headings(plan: PlanConfig, percentile: str, *, timed: bool) -> tuple[str, ...]:
    counts = ("replicas", "chips") if plan.request_rate is not None else ("chips",)
    price = ("price/h",) if plan.price is not None else ()
    speeds = (
        ("req/s", "tok/s", f"TTFT {percentile}", f"TPOT {percentile}")
        if timed
        else ("seconds", "req/s", "tok/s", "TPOT")
    )
    return ("hardware", "tp", *counts, *price, "seqs", "batched tokens", "weights", "KV cache", "KV tokens", *speeds)


def _cells(
    row: Row, plan: EnginePlan, measures: LoadMeasures, plan_config: PlanConfig, *, timed: bool
) -> tuple[str, ...]:
    limits = plan.limits
    memory = plan.memory
    counts = (f"{row.replicas}", f"{row.chips}") if plan_config.request_rate is not None else (f"{row.chips}",)
    price = (("-" if row.price is None else f"{row.price:.2f}",)) if plan_config.price is not None else ()
    speed = (f"{row.rate:.2f}", f"{measures.output_tokens_per_second:.0f}")
    latencies = measures.percentile if timed else measures.mean
    ttft, tpot = (f"{1e3 * latencies[name]:.0f} ms" for name in ("ttft", "tpot"))
    speeds = (*speed, ttft, tpot) if timed else (f"{measures.seconds:.2f}", *speed, tpot)
    sizes = (f"{memory.weights / _GIB:.1f} GiB", f"{memory.kv_cache / _GIB:.1f} GiB", f"{plan.cache_tokens}")
    batch = (f"{limits.max_num_seqs}", f"{limits.max_num_batched_tokens}")
    return (row.hardware, f"{row.tensor_parallel}", *counts, *price, *batch, *sizes, *speeds)
