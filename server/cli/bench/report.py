"""The results of a serving benchmark as a table and as JSON: throughputs and the distributions of four latencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pagoda.common.config.groups.bench import ServeLoadConfig
from pagoda.server.cli.bench.client import Outcome

WIDTH: Final = 50
TITLES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def figures(config: ServeLoadConfig, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the results, times in milliseconds. `seconds`: first request to last answer."""
    good = [each for each in outcomes if not each.error]
    inputs, outputs = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name, times in _times(good).items():
        if name in config.percentile_metrics:
            results |= _statistics(name, np.array(times) * 1000.0, config.metric_percentiles)
    return results


def _times(good: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [each.ttft for each in good],
        "tpot": [each.per_token for each in good if each.per_token is not None],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.latency for each in good],
    }


def _statistics(name: str, times: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    if not times.size:
        times = np.zeros(1)
    statistics = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
    statistics |= {f"p{percentile:g}": np.percentile(times, percentile) for percentile in percentiles}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in statistics.items()}


def detailed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the measurements of every request in sending order, times in seconds."""
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "ttfts": [each.ttft for each in outcomes],
        "itls": [each.gaps for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def report(config: ServeLoadConfig, results: Mapping[str, Any]) -> str:
    """Return the results as a table."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_row(label, value) for label, value in _totals(config, results)]
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in results:
            lines.append(f"{title:-^{WIDTH}}")
            statistics = ("mean", "median", *(f"p{percentile:g}" for percentile in config.metric_percentiles))
            lines += [
                _row(f"{each.capitalize()} {name.upper()} (ms):", results[f"{each}_{name}_ms"]) for each in statistics
            ]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(config: ServeLoadConfig, results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "Successful requests:", results["completed"]
    yield "Failed requests:", results["failed"]
    if config.max_concurrency is not None:
        yield "Maximum request concurrency:", config.max_concurrency
    if config.request_rate != float("inf"):
        yield "Request rate configured (RPS):", config.request_rate
    yield "Benchmark duration (s):", results["duration"]
    yield "Total input tokens:", results["total_input_tokens"]
    yield "Total generated tokens:", results["total_output_tokens"]
    yield "Request throughput (req/s):", results["request_throughput"]
    yield "Output token throughput (tok/s):", results["output_throughput"]
    yield "Total token throughput (tok/s):", results["total_token_throughput"]


def _row(label: str, value: float) -> str:
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{number:<10}"
