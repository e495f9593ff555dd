"""When benchmarks send their requests, and what they report of the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import comma_separated, need_positive, option
from pagoda.common.errors import ConfigError

LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""

QUEUE_LATENCIES: Final = ("client_queue_time", "e2el_including_client_queue")
"""With --max-concurrency: waiting for a free place, and end-to-end latency from arrival."""

OBJECTIVES: Final = ("ttft", "tpot", "e2el")
"""Latencies of a request, of --goodput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Arrival times of requests."""

    request_rate: float = option(math.inf, "Number of requests per second; inf: send all requests at once.")
    burstiness: float = option(
        1.0,
        "Burstiness of arrivals: the shape of the gamma distribution of the gaps between requests. 1: Poisson "
        "arrivals; below 1: burstier; above 1: more regular; inf: constant gaps.",
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        None, "How the request rate changes from --ramp-up-start-rps to --ramp-up-end-rps over the run."
    )
    ramp_up_start_rps: float | None = option(None, "Request rate at the beginning of a ramp-up.")
    ramp_up_end_rps: float | None = option(None, "Request rate at the end of a ramp-up.")
    max_concurrency: int | None = option(None, "Maximum number of concurrent requests; default: unlimited.")
    self_timed: bool | None = option(
        None,
        "Send requests at the arrival times of the file (timed_trace, burstgpt); default: on for timed_trace only.",
    )

    def __post_init__(self) -> None:
        need_positive(self, "max_concurrency")
        if not self.request_rate > 0:
            message = f"{self.request_rate} is not positive; use inf for all requests at once"
            raise ConfigError("--request-rate", message)
        if not self.burstiness > 0:
            raise ConfigError("--burstiness", f"{self.burstiness} is not a positive number")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ConfigError("--ramp-up-strategy", "is required by --ramp-up-start-rps and --ramp-up-end-rps")
            return
        if not math.isinf(self.request_rate):
            raise ConfigError("--request-rate", "is that of --ramp-up-strategy; drop one of them")
        for flag, rate in zip(("--ramp-up-start-rps", "--ramp-up-end-rps"), ends):
            if rate is None:
                raise ConfigError(flag, "is required by --ramp-up-strategy; give requests per second")
            if not 0 < rate < math.inf:
                raise ConfigError(flag, f"{rate} is not a positive number")


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in comma_separated(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Statistics that are reported."""

    percentile_metrics: tuple[str, ...] | None = option(
        None,
        f"Comma-separated metrics to report percentiles of: {', '.join((*LATENCIES, *QUEUE_LATENCIES))}. Default: "
        "ttft,tpot,itl, or e2el for pooling.",
        parse=comma_separated,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,), "Comma-separated percentiles to report.", parse=_percentiles
    )
    goodput: tuple[str, ...] = option(
        (),
        "Latency objectives as KEY:MILLISECONDS pairs, such as ttft:500 tpot:50 e2el:5000. The report then includes "
        "goodput: the number of requests per second that meet all objectives.",
    )

    def __post_init__(self) -> None:
        metrics = (*LATENCIES, *QUEUE_LATENCIES)
        for name in self.percentile_metrics or ():
            if name not in metrics:
                raise ConfigError("--percentile-metrics", f"{name} is not a metric; use {', '.join(metrics)}")
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError("--metric-percentiles", f"{percentile} is not in 0 to 100")
        _ = self.objectives

    @property
    def objectives(self) -> dict[str, float]:
        """--goodput as metric -> seconds. Raises ConfigError."""
        return objectives(self.goodput)


def objectives(pairs: tuple[str, ...], flag: str = "--goodput") -> dict[str, float]:
    """Return KEY:MILLISECONDS pairs as metric -> seconds. Raises ConfigError naming `flag`."""
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not limit >= 0:
            raise ConfigError(flag, f"{pair!r} is not KEY:MILLISECONDS; use {', '.join(OBJECTIVES)}, such as ttft:500")
        limits[name] = limit / 1000.0
    return limits
