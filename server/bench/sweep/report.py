"""The report page of a sweep: charts of throughput and latency, and a table of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pagoda.server.bench.report.pages import html_table, line_chart, page
from pagoda.server.bench.sweep.results import grouped, parameter_names

CHARTS: Final = (
    ("Latency against load", "request_throughput", "median_ttft_ms", "requests/s", "median TTFT (ms)"),
    ("Speed of an answer against load", "request_throughput", "median_tpot_ms", "requests/s", "median TPOT (ms)"),
    ("Throughput against users", "max_concurrency", "output_throughput", "max_concurrency", "output tokens/s"),
    ("Tail latency against throughput", "output_throughput", "p99_ttft_ms", "output tokens/s", "P99 TTFT (ms)"),
    ("End-to-end latency against load", "request_rate", "median_e2el_ms", "request_rate", "median E2EL (ms)"),
    ("Start-up", "run_number", "avg_warm_startup_time", "run", "seconds to the first token"),
)
"""Title, variables of the axes, and their labels; charts whose variables are missing are left out."""

RESULTS: Final = (
    "completed",
    "failed",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "avg_warm_startup_time",
    "avg_cold_startup_time",
)
"""Columns after the parameters; those that no run has are left out."""

_LOADS: Final = ("request_rate", "max_concurrency", "num_prompts", "run_number")
"""Parameters that vary along a curve."""


def write_report(path: Path, runs: Sequence[dict[str, Any]], title: str) -> None:
    """Write the page. It needs no other file and no network."""
    names = parameter_names(runs)
    curves = [name for name in names if name not in _LOADS]
    charts = []
    for heading, x, y, x_label, y_label in CHARTS:
        numbers = [run for run in runs if _is_number(run.get(x)) and _is_number(run.get(y))]
        series = {name or "all runs": _curve(curve, x, y) for name, curve in grouped(numbers, curves).items()}
        if len({point[0] for points in series.values() for point in points}) > 1:
            charts.append(line_chart(heading, series, x_label, y_label))
    columns = [*names, "run_number", *(name for name in RESULTS if any(run.get(name) is not None for run in runs))]
    note = f"<p>{len(runs)} runs. Times are milliseconds, throughputs are per second.</p>"
    figures = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, note, figures, "<h2>All runs</h2>", html_table(columns, runs)), encoding="utf-8")


def _curve(runs: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """Return the mean point of the runs of each load, in the order of the loads."""
    others = [name for name in _LOADS if name not in ("run_number", x)]
    by_load = grouped(runs, [x, *others] if x in _LOADS else others)
    return [(_mean(runs, x), _mean(runs, y)) for runs in by_load.values()]


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.mean(float(run[name]) for run in runs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
