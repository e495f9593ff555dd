"""Metrics, tracing and logging settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import comma_separated, option
from pagoda.common.errors import ConfigError

TRACED_MODULES: Final = ("model", "worker", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Statistics, metrics and traces."""

    disable_log_stats: bool = option(False, "Disable logging of engine statistics.")
    log_stats_interval: float = option(10.0, "Interval between engine statistics log lines, in seconds.")
    enable_log_requests: bool = option(False, "Log each request.")
    show_hidden_metrics_for_version: str | None = option(
        None, "Show deprecated metrics hidden since this version.", no_effect="no metrics are hidden"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of the OpenTelemetry collector that receives one span per request; needs the extra otlp. "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL sets the protocol: grpc (default) or http/protobuf.",
    )
    collect_detailed_traces: tuple[str, ...] = option(
        (),
        "Modules whose phases get spans of their own in each request's trace, comma-separated: worker (prepare, "
        "queue), model (prefill, decode) or all; needs --otlp-traces-endpoint.",
        parse=comma_separated,
    )
    kv_cache_metrics: bool = option(
        False,
        "Collect KV block residency metrics.",
        refused="KV block residency is not measured; use the metric kv_cache_usage_perc",
    )
    kv_cache_metrics_sample: float = option(
        0.01,
        "Fraction of KV blocks sampled for residency metrics.",
        no_effect="it applies only with --kv-cache-metrics",
    )
    cudagraph_metrics: bool = option(
        False,
        "Collect CUDA graph metrics.",
        no_effect="CUDA graph replays are not counted; every decode step replays one unless --enforce-eager is set",
    )
    enable_layerwise_nvtx_tracing: bool = option(
        False, "Add NVTX ranges per layer for Nsight Systems.", no_effect="no NVTX ranges are emitted"
    )
    enable_mfu_metrics: bool = option(
        False, "Collect model FLOPS utilization (MFU) metrics.", refused="MFU is not measured; use tokens per second"
    )

    def __post_init__(self) -> None:
        if not self.log_stats_interval > 0:
            raise ConfigError(
                "--log-stats-interval",
                f"{self.log_stats_interval} is not a positive number of seconds; use --disable-log-stats for no lines",
            )
        self._check_traces()

    def _check_traces(self) -> None:
        """Raise ConfigError for unknown modules, or modules without an endpoint."""
        flag = "--collect-detailed-traces"
        unknown = [name for name in self.collect_detailed_traces if name not in TRACED_MODULES]
        if unknown:
            raise ConfigError(flag, f"unknown module {unknown[0]!r}; use {', '.join(TRACED_MODULES)}")
        if self.collect_detailed_traces and self.otlp_traces_endpoint is None:
            raise ConfigError(flag, "it applies only with --otlp-traces-endpoint; set that, too")

    @property
    def traced_modules(self) -> tuple[str, ...]:
        """The modules of --collect-detailed-traces; all: each of them."""
        names = self.collect_detailed_traces
        return ("model", "worker") if "all" in names else names


LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level_name(text: str) -> str:
    """Return a log level in capitals. Raise ValueError if it is unknown."""
    name = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(text.strip().upper(), text.strip().upper())
    if name not in LEVELS:
        raise ValueError(f"unknown log level; use one of {', '.join(LEVELS)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Logging of the server and the engine process; as a library, pagoda leaves existing logging handlers alone."""

    configure_logging: bool = option(True, "Configure Python logging; if off, existing handlers are used.")
    log_level: str = option("INFO", "Log level: DEBUG, INFO, WARNING, ERROR or CRITICAL.", parse=level_name)
    log_prefix: str = option("", "Prefix of each log line.")
    log_format: Literal["text", "json"] = option(
        "text", "Log format: text, or json: one object per line (time, level, logger, message, process, traceback)."
    )
    log_config_file: str | None = option(
        None, "JSON file for logging.config.dictConfig, instead of the default logging configuration."
    )

    def __post_init__(self) -> None:
        if self.log_config_file is not None and not self.configure_logging:
            raise ConfigError("--log-config-file", "has no use without logging; drop --no-configure-logging")
