"""`pagoda bench sweep plot_pareto`: which combinations give the most tokens per device at each speed for a user."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.groups.bench.sweep import ParetoConfig
from pagoda.common.config.settings import build
from pagoda.common.errors import ConfigError
from pagoda.server.bench.report.plots import figure, need_matplotlib, save
from pagoda.server.bench.sweep.results import Run, read_runs
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["bench sweep plot_pareto"]
_SIZES: Final = (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp"))


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A run: output tokens per second and user, and per second and device."""

    per_user: float
    per_device: float
    label: str


def run(args: argparse.Namespace) -> int:
    """Print the frontier and draw it to pareto/PARETO.png. Returns 0."""
    config = build(ParetoConfig, resolve_flags(args, SETTINGS))
    folder = Path(args.experiment_dir)
    runs = read_runs(folder)
    points = [point for point in (pareto_point(run, config) for run in runs) if point is not None]
    if not points:
        raise ConfigError("--user-count-var", f"no run has {config.user_count_var} and output_throughput; use another")
    best = frontier(points)
    path = folder / "pareto" / "PARETO.png"
    print(f"{path}: {len(points)} of {len(runs)} runs, {len(best)} on the frontier")
    for point in best:
        print(f"  {point.per_user:10.2f} tokens/s/user {point.per_device:10.2f} tokens/s/device  {point.label}")
    if not config.dry_run:
        need_matplotlib("bench sweep plot_pareto")
        _draw(points, best, path)
    return 0


def pareto_point(run: Run, config: ParetoConfig) -> ParetoPoint | None:
    """Return a run's point; None without a number of users."""
    users = next(
        (value for key in (config.user_count_var, "max_concurrent_requests") if (value := _number(run, key))), None
    )
    throughput = _number(run, "output_throughput")
    if users is None or throughput is None:
        return None
    devices = device_count(run, config.gpu_count_var)
    numbers = {**run, "gpu_count": f"{devices:g}"}
    label = ", ".join(f"{name}={numbers[name]}" for name in config.label_by if numbers.get(name) is not None)
    return ParetoPoint(throughput / users, throughput / devices, label)


def device_count(run: Run, variable: str | None) -> float:
    """Return the number of devices of a run: a variable's, or the product of its parallel sizes."""
    if variable is not None:
        count = _number(run, variable)
        if count is None:
            raise ConfigError("--gpu-count-var", f"a run has no {variable}; use another variable")
        return count
    count = 1.0
    for names in _SIZES:
        count *= next((size for name in names if (size := _number(run, name))), 1.0)
    return count


def frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Return the points that no other exceeds in one value and reaches in the other, by speed for a user."""
    best: list[ParetoPoint] = []
    for point in sorted(points, key=lambda candidate: (candidate.per_user, candidate.per_device), reverse=True):
        if not best or point.per_device > best[-1].per_device:
            best.append(point)
    return best[::-1]


def _draw(points: Sequence[ParetoPoint], best: Sequence[ParetoPoint], path: Path) -> None:
    drawn, ((axes,),) = figure(1, 1, 7.2, 5.0)
    axes.scatter([p.per_user for p in points], [p.per_device for p in points], color="0.6", label="all runs")
    axes.plot([p.per_user for p in best], [p.per_device for p in best], marker="o", label="Pareto frontier")
    for point in best:
        label = point.label.replace(", ", "\n")
        place = (point.per_user, point.per_device)
        axes.annotate(label, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="output tokens/s/user", ylabel="output tokens/s/device")
    axes.margins(x=0.25, y=0.15)
    axes.grid(visible=True, linestyle="--", linewidth=0.5, alpha=0.6)
    axes.legend()
    save(drawn, path, 200)


def _number(run: Run, key: str) -> float | None:
    """Return a positive number of a run, however its name is spelled."""
    for name in (key, key.replace("_", "-"), key.replace("-", "_")):
        value: Any = run.get(name)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
