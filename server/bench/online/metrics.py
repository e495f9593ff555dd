"""Timings of requests, and the statistics of a benchmark: throughputs, goodput, peaks and percentiles of latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagoda.common.config.groups.bench.traffic import ReportConfig, TrafficConfig


@dataclass(slots=True)
class Outcome:
    """The timing of a request, in seconds."""

    start: float = 0.0  # Time at which it was sent, by the clock of the benchmark.
    end: float = 0.0  # Time at which the last piece of the answer arrived.
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # Seconds between successive pieces of the answer.
    prompt_tokens: int = 0
    output_tokens: int = 0
    sequences: int = 1  # Number of texts in the request, as in a batch of embeddings.
    queued: float = 0.0  # Seconds that it waited for a free place of --max-concurrency before it was sent.
    text: str = ""  # Text of the answer.
    error: str = ""  # Why it failed; the timing is then meaningless.

    @property
    def latency(self) -> float:
        """The time from the request to the last piece."""
        return self.end - self.start

    @property
    def per_token(self) -> float | None:
        """The mean time per token after the first; None if there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """True if each latency is at most its objective, in seconds; a single token meets any time per token."""
        latencies = {"ttft": self.ttft, "tpot": self.per_token or 0.0, "e2el": self.latency}
        return all(latencies[name] <= limit for name, limit in objectives.items())


def results_of(
    outcomes: Sequence[Outcome],
    seconds: float,
    report: ReportConfig,
    traffic: TrafficConfig | None = None,
    *,
    pooling: bool = False,
) -> dict[str, Any]:
    """Return the results under vLLM's names, latencies in milliseconds.

    `seconds`: from the start to the last answer. `traffic`: adds latencies of the client's queue. `pooling`: requests
    have no output tokens.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    totals = _pooling_totals(good, seconds) if pooling else _totals(good, seconds, report)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        **totals,
    }
    chosen = report.percentile_metrics or (("e2el",) if pooling else ("ttft", "tpot", "itl"))
    for name, times in latencies_of(good, traffic, pooling=pooling).items():
        if name in chosen:
            results |= _statistics(name, np.array(times) * 1000.0, report.metric_percentiles)
    return results


def latencies_of(
    good: Sequence[Outcome], traffic: TrafficConfig | None = None, *, pooling: bool = False
) -> dict[str, list[float]]:
    """Return metric -> its values, in seconds."""
    values = {}
    if not pooling:
        values = {
            "ttft": [outcome.ttft for outcome in good],
            "tpot": [outcome.per_token for outcome in good if outcome.per_token is not None],
            "itl": [gap for outcome in good for gap in outcome.gaps],
        }
    values["e2el"] = [outcome.latency for outcome in good]
    if traffic is not None and traffic.max_concurrency is not None:
        values["client_queue_time"] = [outcome.queued for outcome in good]
        values["e2el_including_client_queue"] = [outcome.latency + outcome.queued for outcome in good]
    return values


def times_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return what every result file has of each request, in the order of the dataset and in seconds."""
    return {
        "latencies": [0.0 if outcome.error else outcome.latency for outcome in outcomes],
        "queue_times": [outcome.queued for outcome in outcomes],
    }


def detailed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the other measurements of every request in the order of the dataset, times in seconds."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Return the largest number of requests that were in flight at once."""
    events = [(outcome.start, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes]
    changes = np.array([change for _, change in sorted(events)], np.int64)
    return int(changes.cumsum().max(initial=0))


def peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Return the most output tokens that arrived in a second counted from the first request.

    A piece of several tokens counts as its share of the answer.
    """
    if not outcomes:
        return 0.0
    first = min(outcome.start for outcome in outcomes)
    counts = np.zeros(int(max(outcome.end for outcome in outcomes) - first) + 1)
    for outcome in outcomes:
        arrivals = outcome.start - first + outcome.ttft + np.cumsum([0.0, *outcome.gaps])
        share = outcome.output_tokens / len(arrivals)
        np.add.at(counts, np.minimum(arrivals.astype(np.int64), len(counts) - 1), share)
    return float(counts.max())


def _totals(good: Sequence[Outcome], seconds: float, report: ReportConfig) -> dict[str, Any]:
    inputs = sum(outcome.prompt_tokens for outcome in good)
    outputs = sum(outcome.output_tokens for outcome in good)
    objectives = report.objectives
    goodput = sum(outcome.meets(objectives) for outcome in good) / seconds if objectives else None
    return {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": goodput,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_concurrency(good),
    }


def _pooling_totals(good: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    inputs = sum(outcome.prompt_tokens for outcome in good)
    sequences = sum(outcome.sequences for outcome in good)
    return {
        "total_input_tokens": inputs,
        "total_input_sequences": sequences,
        "request_throughput": len(good) / seconds,
        "input_sequence_throughput": sequences / seconds,
        "total_token_throughput": inputs / seconds,
    }


def _statistics(name: str, times: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles, zeros without values."""
    if not times.size:
        times = np.zeros(1)
    statistics = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
    statistics |= {f"p{percentile:g}": np.percentile(times, percentile) for percentile in percentiles}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in statistics.items()}
