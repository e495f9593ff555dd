"""`pagoda bench sweep serve_sla`: the largest load that meets objectives, for each combination of flags."""

from __future__ import annotations

import argparse
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.groups.bench.sweep import SlaConfig, SweepConfig, SweepServeConfig
from pagoda.common.config.settings import build
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.server.bench.sweep.params import Combination, file_name, read_params
from pagoda.server.bench.sweep.runs import (
    Experiment,
    SweptServer,
    measure_combination,
    pairs_to_run,
    swept_server,
    write_json,
)
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["bench sweep serve_sla"]

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CRITERION: Final = re.compile(r"\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*")

Meets = Callable[[int], bool]
"""Measures a load and returns whether it meets the objectives."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound of one result."""

    key: str
    sign: str
    bound: float

    @classmethod
    def of(cls, key: str, text: Any, path: str) -> Criterion:
        """Parse a bound such as "<=500". Raises ConfigError."""
        match = _CRITERION.fullmatch(text) if isinstance(text, str) else None
        try:
            return cls(key, match[1], float(match[2])) if match is not None else cls._fail(key, text, path)
        except ValueError:
            return cls._fail(key, text, path)

    @classmethod
    def _fail(cls, key: str, text: Any, path: str) -> Criterion:
        raise ConfigError("--sla-params", f'{path}: {key}: {text!r} is not a bound; use one such as "<=500"')

    def met_by(self, runs: Sequence[Mapping[str, Any]]) -> bool:
        """True if the mean over runs is within the bound. Raises ConfigError if the result is missing."""
        if any(not isinstance(run.get(self.key), int | float) for run in runs):
            remedy = "add it to --metric-percentiles in --bench-cmd" if re.match(r"p[0-9]", self.key) else "rename it"
            raise ConfigError("--sla-params", f"the benchmark has no result {self.key}; {remedy}")
        return _OPERATORS[self.sign](statistics.mean(run[self.key] for run in runs), self.bound)


def largest(meets: Meets, start: int, most: int) -> tuple[int | None, bool]:
    """Return the largest integer load that meets the objectives, and whether the search was complete.

    Doubles or halves from `start` until the answer changes, then bisects; `most` loads are measured at most. Returns
    None if no load of at least 1 meets them.
    """
    tried: dict[int, bool] = {}

    def test(value: int) -> bool:
        if value not in tried:
            tried[value] = meets(value)
        return tried[value]

    good = 0
    bad = 0
    value = max(1, start)
    while len(tried) < most and not (good and bad) and value:
        if test(value):
            good = value
            value = value * 2
        else:
            bad = value
            value = value // 2
    while len(tried) < most and good and bad - good > 1:
        value = (good + bad) // 2
        if test(value):
            good = value
        else:
            bad = value
    return good or None, bad == 1 or bool(good and bad - good == 1)


def run(args: argparse.Namespace) -> int:
    """Search. Returns 0. Raises PagodaError if a run failed."""
    values = resolve_flags(args, SETTINGS)
    config = build(SweepConfig, values)
    serve = build(SweepServeConfig, values)
    sla = build(SlaConfig, values)
    server_params = read_params(config.serve_params, "--serve-params")
    bench_params = read_params(serve.bench_params, "--bench-params")
    objectives = read_params(sla.sla_params, "--sla-params")
    for objective in objectives:
        _criteria(objective, sla)
    if any(bench_flags.get(sla.sla_variable) is not None for bench_flags in bench_params):
        raise ConfigError("--bench-params", f"sets {sla.sla_variable}, which is searched; drop it there")
    experiment = Experiment.of(config)
    results: list[dict[str, Any]] = []
    for server_flags in server_params:
        with swept_server(config, serve, server_flags, needed=True) as server:
            for bench_flags in pairs_to_run(server_flags, bench_params, serve):
                for objective in objectives:
                    search = Search(experiment, serve, sla, server, (server_flags, bench_flags))
                    results += search.run(objective)
    if not config.dry_run:
        experiment.finish(results, f"Loads that meet objectives: {experiment.folder.name}")
    return 0


@dataclass(frozen=True, slots=True)
class Search:
    """The search for one combination of server and benchmark flags."""

    experiment: Experiment
    serve: SweepServeConfig
    sla: SlaConfig
    server: SweptServer | None
    flags: tuple[Combination, Combination]

    def run(self, objective: Combination) -> list[dict[str, Any]]:
        """Print the largest load that meets an objective, and return the runs of all loads that were tried."""
        server_flags, bench_flags = self.flags
        criteria = _criteria(objective, self.sla)
        unlimited = self._measure("inf", None)
        if self.experiment.config.dry_run:
            print(f"  then {self.sla.sla_variable} from 1 for: {objective.as_text()}")
            return []
        runs = list(unlimited)
        start = max(1, round(statistics.mean(self._load(run) for run in unlimited)))

        def meets(value: int) -> bool:
            measured = self._measure(str(value), value)
            runs.extend(measured)
            return all(criterion.met_by(measured) for criterion in criteria)

        if all(criterion.met_by(unlimited) for criterion in criteria):
            best = None
            complete = True
            shown = "any (all requests at once meet the objectives)"
        else:
            best, complete = largest(meets, start, self.sla.sla_iters)
            shown = "none" if best is None else str(best)
        note = "" if complete else f" (--sla-iters {self.sla.sla_iters} ended the search)"
        print(
            f"{server_flags.as_text()}; {bench_flags.as_text()}; {objective.as_text()}: "
            f"{self.sla.sla_variable} {shown}{note}"
        )
        folder = self.experiment.path(serve=server_flags, bench=bench_flags)
        write_json(
            folder / file_name(f"SLA-{objective.name}.json"),
            {
                "objectives": dict(objective.values),
                "variable": self.sla.sla_variable,
                "best": shown,
                "complete": complete,
            },
        )
        return [run | {"objectives": objective.name} for run in runs]

    def _measure(self, name: str, value: int | None) -> list[dict[str, Any]]:
        """Return the runs at a load; None: unlimited."""
        server_flags, bench_flags = self.flags
        folder = self.experiment.path(serve=server_flags, bench=bench_flags) / f"{self.sla.sla_variable}={name}"
        loaded = bench_flags if value is None else bench_flags.with_value(self.sla.sla_variable, value)
        runs = measure_combination(self.experiment, self.serve, self.server, folder, (server_flags, loaded))
        if not runs and not self.experiment.config.dry_run:
            raise PagodaError(f"no run of {loaded.as_text()} succeeded")
        return runs

    def _load(self, run: Mapping[str, Any]) -> float:
        """Return the load of an unlimited run: requests per second, or requests in flight by Little's law."""
        rate = float(run["request_throughput"])
        return rate if self.sla.sla_variable == "request_rate" else rate * float(run["mean_e2el_ms"]) / 1000.0


def _criteria(objective: Combination, sla: SlaConfig) -> list[Criterion]:
    return [Criterion.of(key, text, sla.sla_params or "") for key, text in objective.values.items()]
