"""What is counted, traced and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.config.fields import option
from pagoda.common.errors import ConfigError

_NO_TRACES: Final = "traces are not in this version; scrape /metrics instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Metrics and traces."""

    disable_log_stats: bool = option(False, "Do not log engine statistics.")
    log_stats_interval: float = option(10.0, "Seconds between two lines of engine statistics in the log.")
    enable_log_requests: bool = option(False, "Log each generation request.")
    show_hidden_metrics_for_version: str | None = option(
        None, "Show metrics hidden since this version.", no_effect="no metric is hidden here"
    )
    otlp_traces_endpoint: str | None = option(None, "Collector of OpenTelemetry traces.", refused=_NO_TRACES)
    collect_detailed_traces: str | None = option(None, "Modules to trace in detail.", refused=_NO_TRACES)
    kv_cache_metrics: bool = option(
        False, "Count how long KV blocks live.", refused="KV block lifetimes are not counted; use kv_cache_usage_perc"
    )
    kv_cache_metrics_sample: float = option(0.01, "Share counted.", no_effect="it matters with --kv-cache-metrics only")
    cudagraph_metrics: bool = option(
        False,
        "Count graph replays.",
        no_effect="every decode step replays a graph unless --enforce-eager; none is counted",
    )
    enable_layerwise_nvtx_tracing: bool = option(
        False, "Mark layers for Nsight.", no_effect="no backend of this version runs where Nsight looks"
    )
    enable_mfu_metrics: bool = option(
        False, "Report the share of peak FLOP/s.", refused="peak FLOP/s of a CPU are not known; use tokens/s"
    )

    def __post_init__(self) -> None:
        if not self.log_stats_interval > 0:
            raise ConfigError(
                "--log-stats-interval",
                f"{self.log_stats_interval} is not a positive number of seconds; --disable-log-stats ends the lines",
            )


# What is logged, how, and where to.

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level_name(text: str) -> str:
    """A level's name in capitals. Raises ValueError."""
    name = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(text.strip().upper(), text.strip().upper())
    if name not in LEVELS:
        raise ValueError(f"no log level; choose from {', '.join(LEVELS)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Logs of the server and the engine. A program that uses pagoda as a library keeps the logging it has set up."""

    configure_logging: bool = option(True, "Set up logging; without it, log records go where Python sends them.")
    log_level: str = option("INFO", "How much is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL.", parse=level_name)
    log_prefix: str = option("", "Text in front of each log line.")
    log_config_file: str | None = option(None, "JSON for logging.config.dictConfig, in place of the usual logging.")

    def __post_init__(self) -> None:
        if self.log_config_file is not None and not self.configure_logging:
            raise ConfigError("--log-config-file", "logging is not set up at all; drop --no-configure-logging")
