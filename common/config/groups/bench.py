"""Settings of the benchmark commands. `bench latency`, `throughput` and `startup` also take the engine's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from pagoda.common.config.fields import comma_separated, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

MEASURES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in comma_separated(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """Workload of `bench latency`: one batch, repeated."""

    input_len: int = option(32, "Prompt length, in tokens.")
    output_len: int = option(128, "Output length, in tokens.")
    batch_size: int = option(8, "Number of prompts per batch.")
    n: int = option(1, "Number of sequences generated per prompt.")
    num_iters_warmup: int = option(10, "Number of warm-up batches.")
    num_iters: int = option(30, "Number of measured batches.")
    disable_detokenize: bool = option(False, "Disable detokenisation.")
    output_json: str | None = option(None, "Output file for the results, as JSON.")
    use_beam_search: bool = option(
        False, "Use beam search.", refused="beam search is not benchmarked; use --n for several sequences per prompt"
    )
    profile: bool = option(
        False, "Write a trace of one batch after the warm-up, as set by --profiler-config, instead of measuring."
    )

    def __post_init__(self) -> None:
        need_positive(self, "input_len", "output_len", "batch_size", "n", "num_iters")
        need_not_negative(self, "num_iters_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Workload of `bench throughput`: all requests submitted at once."""

    input_len: int = option(1024, "Prompt length, in tokens.")
    output_len: int = option(128, "Output length, in tokens.")
    num_prompts: int = option(1000, "Number of requests.")
    n: int = option(1, "Number of sequences generated per prompt.")
    disable_detokenize: bool = option(False, "Disable detokenisation.")
    output_json: str | None = option(None, "Output file for the results, as JSON.")

    def __post_init__(self) -> None:
        need_positive(self, "input_len", "output_len", "num_prompts", "n")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Workload of `bench startup`: repeated starts of a server."""

    num_iters_warmup: int = option(1, "Number of warm-up starts, which fill the disk cache.")
    num_iters: int = option(3, "Number of measured starts.")
    input_len: int = option(8, "Length of the prompt whose first output token ends the measurement, in tokens.")
    output_json: str | None = option(None, "Output file for the results, as JSON.")

    def __post_init__(self) -> None:
        need_positive(self, "num_iters", "input_len")
        need_not_negative(self, "num_iters_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoadConfig:
    """Workload, target server and reports of `bench serve`."""

    backend: Literal["openai", "openai-chat", "vllm"] = option(
        "openai", "API to benchmark: completions (openai, vllm) or chat completions (openai-chat)."
    )
    base_url: str | None = option(
        None, "Base URL of the server, such as http://host:8000; overrides --host and --port."
    )
    host: str = option("127.0.0.1", "Server host.")
    port: int = option(8000, "Server port.")
    endpoint: str | None = option(None, "API path; default: the path of --backend.")
    model: str | None = option(None, "Model name; default: the first model that the server lists.")
    served_model_name: str | None = option(None, "Model name in requests, if it differs from --model.")
    tokenizer: str | None = option(
        None, "Tokenizer for generating prompts; default: that of --model, or of the served model."
    )
    dataset_name: str = option(
        "random",
        "Dataset of prompts.",
        refused="only random prompts are supported (--random-input-len); replay other data with run-batch",
    )
    random_input_len: int = option(1024, "Prompt length, in tokens.")
    random_output_len: int = option(128, "Output length, in tokens.")
    random_range_ratio: float = option(
        0.0, "Range of lengths: uniform in length * (1 - ratio) to length * (1 + ratio); 0 <= ratio < 1."
    )
    random_prefix_len: int = option(0, "Length of a prefix shared by all prompts, in tokens; added to each prompt.")
    num_prompts: int = option(1000, "Number of requests.")
    num_warmups: int = option(1, "Number of warm-up requests, sent sequentially.")
    request_rate: float = option(math.inf, "Requests per second; inf: all requests at once.")
    burstiness: float = option(
        1.0, "Burstiness of request arrivals: 1 is a Poisson process, below 1 burstier, above 1 more uniform."
    )
    max_concurrency: int | None = option(None, "Maximum number of concurrent requests; default: unlimited.")
    temperature: float = option(0.0, "Sampling temperature.")
    seed: int = option(0, "Random seed for prompts, lengths and arrival times.")
    ignore_eos: bool = option(False, "Ignore end-of-sequence tokens and generate the full output length.")
    percentile_metrics: tuple[str, ...] = option(
        ("ttft", "tpot", "itl"),
        f"Comma-separated metrics to report percentiles of: {', '.join(MEASURES)}.",
        parse=comma_separated,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,), "Comma-separated percentiles to report.", parse=_percentiles
    )
    disable_tqdm: bool = option(False, "Disable the progress bar.")
    save_result: bool = option(False, "Save the results to a JSON file.")
    save_detailed: bool = option(False, "Save per-request results too; needs --save-result.")
    result_dir: str | None = option(None, "Directory of the result file; default: the current directory.")
    result_filename: str | None = option(
        None, "Name of the result file; default: composed of backend, request rate, model and time."
    )
    metadata: tuple[str, ...] = option((), "KEY=VALUE pairs to add to the result file.")

    def __post_init__(self) -> None:
        need_positive(self, "random_input_len", "random_output_len", "num_prompts", "max_concurrency")
        need_not_negative(self, "random_prefix_len", "num_warmups")
        _need(0 <= self.random_range_ratio < 1, "--random-range-ratio", f"{self.random_range_ratio} is not in [0, 1)")
        _need(
            self.request_rate > 0,
            "--request-rate",
            f"{self.request_rate} is not positive; use inf for all requests at once",
        )
        _need(0 < self.burstiness < math.inf, "--burstiness", f"{self.burstiness} is not a positive number")
        _check_reports(self.percentile_metrics, self.metric_percentiles)
        saves = self.save_detailed or self.result_dir is not None or self.result_filename is not None or self.metadata
        _need(self.save_result or not saves, "--save-result", "is required by the other result flags; add it")
        for pair in self.metadata:
            _need("=" in pair, "--metadata", f"{pair} is not KEY=VALUE")
        parts = urlsplit(self.address)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        _need(is_http, "--base-url", f"{self.base_url} is not an HTTP URL; use one such as http://localhost:8000")

    @property
    def address(self) -> str:
        """The server's URL: --base-url without a trailing slash, or `http://host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """The API path of the requests."""
        return self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @property
    def is_chat(self) -> bool:
        """True if requests are chat completions."""
        return self.backend == "openai-chat"


def _need(condition: bool, flag: str, message: str) -> None:
    if not condition:
        raise ConfigError(flag, message)


def _check_reports(measures: Iterable[str], percentiles: Iterable[float]) -> None:
    for name in measures:
        _need(name in MEASURES, "--percentile-metrics", f"{name} is not a metric; use {', '.join(MEASURES)}")
    for percentile in percentiles:
        _need(0 <= percentile <= 100, "--metric-percentiles", f"{percentile} is not in 0 to 100")
