"""The table of results that `bench serve` and `simulate` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 50
TITLES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "End-to-end Latency from Arrival"),
}
"""Metric -> its short name and the title of its section."""

_TOTALS: Final = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "input_sequence_throughput": "Input throughput (inputs/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_PROBES: Final = {
    "probe_completed": "Probe requests completed:",
    "probe_failed": "Probe requests failed:",
    "probe_median_e2el_ms": "Median probe E2EL (ms):",
    "probe_p99_e2el_ms": "P99 probe E2EL (ms):",
    "probe_max_e2el_ms": "Max probe E2EL (ms):",
}


def result_table(results: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """Return the results of `metrics.results_of` as a table.

    `max_concurrency` and a finite `request_rate` are shown if `results` has them.
    """
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_rows(_TOTALS, results)]
    if "probe_completed" in results:
        lines += [f"{'Probe Requests':-^{WIDTH}}", *_rows(_PROBES, results)]
    for name, (short, heading) in TITLES.items():
        if f"mean_{name}_ms" in results:
            lines.append(f"{heading:-^{WIDTH}}")
            statistics = ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles))
            lines += [
                row(f"{statistic.capitalize()} {short} (ms):", results[f"{statistic}_{name}_ms"])
                for statistic in statistics
            ]
    if drafts := acceptance_rows(results):
        lines += [f"{'Speculative Decoding':-^{WIDTH}}", *(row(label, value) for label, value in drafts)]
    return "\n".join([*lines, "=" * WIDTH])


def acceptance_rows(results: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the label and value of each line about drafts; none without speculative decoding."""
    if "spec_decode_num_drafts" not in results:
        return []
    return [
        ("Acceptance rate (%):", results["spec_decode_acceptance_rate"]),
        ("Acceptance length:", results["spec_decode_acceptance_length"]),
        ("Drafts:", results["spec_decode_num_drafts"]),
        ("Draft tokens:", results["spec_decode_draft_tokens"]),
        ("Accepted tokens:", results["spec_decode_accepted_tokens"]),
        *(
            (f"Acceptance at position {position} (%):", 100.0 * rate)
            for position, rate in enumerate(results["spec_decode_per_position_acceptance_rates"])
        ),
    ]


def row(label: str, value: float) -> str:
    """Return one line of the table."""
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{number:<10}"


def _rows(labels: Mapping[str, str], results: Mapping[str, Any]) -> Iterator[str]:
    for key, label in labels.items():
        value = results.get(key)
        if value is not None and value != float("inf"):
            yield row(label, value)
