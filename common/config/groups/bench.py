"""What the benchmark commands measure. `bench latency`, `throughput` and `startup` take the engine's settings too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pagoda.common.config.fields import option
from pagoda.common.errors import ConfigError

MEASURES: Final = ("ttft", "tpot", "itl", "e2el")
"""First token, mean per token after it, between tokens, first byte sent to last token."""

_NO_PROFILER: Final = "a profile of the device's threads needs an outside tool; run the command under py-spy or nsys"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in _words(text))


def _need_positive(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(flag_of(name), f"{getattr(config, name)} is not positive; use 1 or more")


def flag_of(name: str) -> str:
    """`--its-flag`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """The load of `bench latency`: one batch, again and again."""

    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens to generate for each prompt.")
    batch_size: int = option(8, "Prompts in a batch.")
    n: int = option(1, "Sequences generated per prompt.")
    num_iters_warmup: int = option(10, "Batches before measuring.")
    num_iters: int = option(30, "Measured batches.")
    disable_detokenize: bool = option(False, "Leave detokenisation out of the time.")
    output_json: str | None = option(None, "File for the results as JSON.")
    use_beam_search: bool = option(
        False, "Generate with beam search.", refused="there is no beam search; --n measures several answers per prompt"
    )
    profile: bool = option(False, "Profile one batch.", refused=_NO_PROFILER)

    def __post_init__(self) -> None:
        _need_positive(self, "input_len", "output_len", "batch_size", "n", "num_iters")
        if self.num_iters_warmup < 0:
            raise ConfigError("--num-iters-warmup", f"{self.num_iters_warmup} is negative; use 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """The load of `bench throughput`: all requests at once."""

    input_len: int = option(1024, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens to generate for each prompt.")
    num_prompts: int = option(1000, "Number of requests.")
    n: int = option(1, "Sequences generated per prompt.")
    disable_detokenize: bool = option(False, "Leave detokenisation out of the time.")
    output_json: str | None = option(None, "File for the results as JSON.")

    def __post_init__(self) -> None:
        _need_positive(self, "input_len", "output_len", "num_prompts", "n")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """How often `bench startup` starts a server."""

    num_iters_warmup: int = option(1, "Starts before measuring, which fill the disk cache.")
    num_iters: int = option(3, "Measured starts.")
    input_len: int = option(8, "Tokens of the prompt whose first answer token ends a start.")
    output_json: str | None = option(None, "File for the results as JSON.")

    def __post_init__(self) -> None:
        _need_positive(self, "num_iters", "input_len")
        if self.num_iters_warmup < 0:
            raise ConfigError("--num-iters-warmup", f"{self.num_iters_warmup} is negative; use 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoadConfig:
    """The load of `bench serve`: where it goes, what it asks, how fast it comes, and what is reported."""

    backend: Literal["openai", "openai-chat", "vllm"] = option(
        "openai", "Endpoint to load: completions (openai, vllm) or chat completions."
    )
    base_url: str | None = option(None, "Address of the server, such as http://host:8000; in place of host and port.")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.")
    endpoint: str | None = option(None, "Path to load; default: the one of --backend.")
    model: str | None = option(None, "Model to ask; default: the first that the server lists.")
    served_model_name: str | None = option(None, "Name that the server knows --model under.")
    tokenizer: str | None = option(None, "Tokenizer that draws the prompts; default: --model's, or the served model's.")
    dataset_name: str = option(
        "random",
        "What prompts are made of.",
        refused="prompts are random tokens of --random-input-len; replay other data with run-batch",
    )
    random_input_len: int = option(1024, "Tokens of each prompt.")
    random_output_len: int = option(128, "Tokens to generate for each prompt.")
    random_range_ratio: float = option(0.0, "Lengths vary evenly by this share, up and down; 0 to below 1.")
    random_prefix_len: int = option(0, "Tokens in front of each prompt that all prompts share.")
    num_prompts: int = option(1000, "Number of requests.")
    num_warmups: int = option(1, "Requests before measuring, one after the other.")
    request_rate: float = option(math.inf, "Requests per second; inf: all at once.")
    burstiness: float = option(1.0, "Shape of the gaps between requests: 1 Poisson, below burstier, above steadier.")
    max_concurrency: int | None = option(None, "Most requests at a time; default: no limit.")
    temperature: float = option(0.0, "Sampling temperature.")
    seed: int = option(0, "Seed of prompts, lengths and gaps.")
    ignore_eos: bool = option(False, "Generate every token asked for, past the end of the text.")
    percentile_metrics: tuple[str, ...] = option(
        ("ttft", "tpot", "itl"), f"Times to report, with commas: {', '.join(MEASURES)}.", parse=_words
    )
    metric_percentiles: tuple[float, ...] = option((99.0,), "Percentiles to report, with commas.", parse=_percentiles)
    disable_tqdm: bool = option(False, "Show no progress bar.")
    save_result: bool = option(False, "Write the results as JSON.")
    save_detailed: bool = option(False, "Write the figures of every request too; needs --save-result.")
    result_dir: str | None = option(None, "Folder of the results; default: the current one.")
    result_filename: str | None = option(None, "Name of the results; default: from backend, rate, model and time.")
    metadata: tuple[str, ...] = option((), "KEY=VALUE pairs to add to the results.")

    def __post_init__(self) -> None:
        _need_positive(self, "random_input_len", "random_output_len", "num_prompts")
        if self.max_concurrency is not None:
            _need_positive(self, "max_concurrency")
        _need(
            self.random_prefix_len >= 0, "--random-prefix-len", f"{self.random_prefix_len} is negative; use 0 or more"
        )
        _need(self.num_warmups >= 0, "--num-warmups", f"{self.num_warmups} is negative; use 0 or more")
        _need(0 <= self.random_range_ratio < 1, "--random-range-ratio", f"{self.random_range_ratio} is not in [0, 1)")
        _need(self.request_rate > 0, "--request-rate", f"{self.request_rate} is not positive; use inf for all at once")
        _need(0 < self.burstiness < math.inf, "--burstiness", f"{self.burstiness} is not a positive number")
        _check_reports(self.percentile_metrics, self.metric_percentiles)
        wanted = self.save_detailed or self.result_dir is not None or self.result_filename is not None or self.metadata
        _need(self.save_result or not wanted, "--save-result", "is missing, so there is no file to write; add it")
        for pair in self.metadata:
            _need("=" in pair, "--metadata", f"{pair} is not KEY=VALUE")
        parts = urlsplit(self.address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _need(good, "--base-url", f"{self.base_url} is not an http address; use one such as http://localhost:8000")

    @property
    def address(self) -> str:
        """`http://host:port`, without a path at its end unless --base-url has one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """The path that is loaded."""
        return self.endpoint or ("/v1/chat/completions" if self.chats else "/v1/completions")

    @property
    def chats(self) -> bool:
        """Whether requests are conversations."""
        return self.backend == "openai-chat"


def _need(holds: bool, flag: str, message: str) -> None:
    if not holds:
        raise ConfigError(flag, message)


def _check_reports(measures: Iterable[str], percentiles: Iterable[float]) -> None:
    for name in measures:
        _need(name in MEASURES, "--percentile-metrics", f"{name} is no measure; choose from {', '.join(MEASURES)}")
    for percentile in percentiles:
        _need(0 <= percentile <= 100, "--metric-percentiles", f"{percentile} is not in 0 to 100")
