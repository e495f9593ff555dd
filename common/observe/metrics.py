"""Prometheus metrics of one server, in a separate registry, under vLLM's names where vLLM has them.

Labels come from a closed set: served model name, engine number, finish reason, kind of ignored request part.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagoda.common.engine.messages import EngineStats, StepOutputs
from pagoda.common.observe.logs import Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")

IGNORED_KINDS: Final = ("unknown", "hint", "tool", "item")
"""Kinds of request parts that are accepted and ignored."""

SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
"""Indexed by sleep level; 0: awake."""

_LABELS: Final = ("model_name", "engine")
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_FIRST_TOKEN_SECONDS: Final = (*_FIRST_TOKEN, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_SECONDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000),
)
_CHOICES: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)

_SPARE_TIMES: Final = 64
"""Entries in the table of last tokens, beyond twice the running sequences, that trigger its clean-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """One of a request's n sequences. Monotonic seconds, 0 if it did not happen or is unknown."""

    is_complete: bool  # ended by itself, not aborted
    scheduled: float  # first scheduled
    first_token: float
    last_token: float
    cached_tokens: int
    generation_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request whose n sequences have all ended. Monotonic seconds."""

    finish_reason: str
    arrival: float
    queued: float  # sent to the engine
    prompt_tokens: int
    n: int
    max_tokens: int | None
    sequences: tuple[FinishedSequence, ...]


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self.stats = EngineStats()
        self.sleep_level = 0
        self._model_name, self._engine = model_name, engine
        self._last_tokens: dict[str, float] = {}
        self._generated = self._prompted = 0
        ProcessCollector(registry=self.registry)
        self.registry.register(_StatsCollector(self, model_name, engine))

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests with a first token.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        success = Counter(
            "vllm:request_success",
            "Finished requests, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(model_name, engine, reason) for reason in FINISH_REASONS}

        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Prompt and generated tokens computed per engine step.", _STEP_TOKENS
        )
        self._first_token = self._seconds(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS
        )
        self._inter_token = _WeightedHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens of a sequence. Seconds.",
            _TOKEN_SECONDS,
            (model_name, engine),
        )
        self.registry.register(self._inter_token)
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self._end_to_end = self._seconds("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_SECONDS)
        self._decode = self._seconds("request_decode_time_seconds", "First to last token.", _REQUEST_SECONDS)
        self._queue = self._seconds("request_queue_time_seconds", "Sent to the engine to scheduled.", _REQUEST_SECONDS)
        self._prefill = self._seconds("request_prefill_time_seconds", "Scheduled to first token.", _REQUEST_SECONDS)
        self._inference = self._seconds("request_inference_time_seconds", "Scheduled to last token.", _REQUEST_SECONDS)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions per sequence.", _PREEMPTIONS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, not found in the prefix cache.", _LENGTHS
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest sequence of a request.", _LENGTHS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per sequence.", _LENGTHS)
        self._request_generated = self._histogram("request_generation_tokens", "Tokens per sequence.", _LENGTHS)
        self._params_n = self._histogram("request_params_n", "n per request.", _CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens per sequence.", _LENGTHS)

        ignored = Counter(
            "pagoda:ignored_request_parts",
            "Request fields, hints and tools accepted and ignored, by kind.",
            (*_LABELS, "kind"),
            registry=self.registry,
        )
        self._ignored = {kind: ignored.labels(model_name, engine, kind) for kind in IGNORED_KINDS}

    def on_ignored(self, kinds: Iterable[str]) -> None:
        """Count the ignored parts of a request; each kind is one of IGNORED_KINDS."""
        for kind in kinds:
            self._ignored[kind].inc()

    def on_step(self, step: StepOutputs) -> None:
        """Record the outputs of one engine step, or of several merged ones, as of now."""
        self.stats = stats = step.stats
        for each in (*step.earlier, stats):
            if each.last_step_tokens:  # zero when the engine is idle
                self._step_tokens.observe(each.last_step_tokens)
        if not step.outputs:  # a prefill chunk without a token
            return
        now = time.monotonic()
        generated = 0
        last = self._last_tokens
        waits: dict[float, int] = {}  # most sequences of a batch have the same time of their last token
        for output in step.outputs:
            count = len(output.new_token_ids)
            generated += count
            before = last.get(output.request_id)
            if before is not None and count:
                wait = (now - before) / count
                waits[wait] = waits.get(wait, 0) + count
            if output.finish_reason is None:
                last[output.request_id] = now
            elif before is not None:
                del last[output.request_id]
        for wait, times in waits.items():
            self._inter_token.observe(wait, times)
        self._generation_tokens.inc(generated)
        self._generated += generated
        if len(last) > 2 * stats.running + _SPARE_TIMES:  # aborted sequences have no final output
            current = {output.request_id for output in step.outputs}
            self._last_tokens = {request_id: at for request_id, at in last.items() if request_id in current}

    def on_first_token(self, *, arrival: float, first_token: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Record a request's first token. Monotonic seconds."""
        self._first_token.observe(max(0.0, first_token - arrival))
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._prompted += prompt_tokens

    def on_finish(self, request: FinishedRequest) -> None:
        """Record a finished request. Aborted sequences are not timed."""
        self._success[request.finish_reason].inc()
        complete = [sequence for sequence in request.sequences if sequence.is_complete and sequence.first_token]
        for sequence in complete:
            self._on_sequence(request, sequence)
        if len(complete) == request.n:
            self._params_n.observe(request.n)
            self._longest.observe(max(sequence.generation_tokens for sequence in complete))

    def _on_sequence(self, request: FinishedRequest, sequence: FinishedSequence) -> None:
        if request.max_tokens is not None:
            self._params_max_tokens.observe(request.max_tokens)
        decode = max(0.0, sequence.last_token - sequence.first_token)
        self._request_generated.observe(sequence.generation_tokens)
        self._end_to_end.observe(max(0.0, sequence.last_token - request.arrival))
        self._decode.observe(decode)
        if sequence.generation_tokens > 1:
            self._per_token.observe(decode / (sequence.generation_tokens - 1))
        self._on_prompt(request.prompt_tokens, sequence.cached_tokens, sequence.preemptions)
        self._on_run(request.queued, sequence.scheduled, sequence.first_token, sequence.last_token)

    def _on_prompt(self, tokens: int, cached: int = 0, preemptions: int = 0) -> None:
        self._request_prompt.observe(tokens)
        self._computed.observe(tokens - cached)
        self._request_preemptions.observe(preemptions)

    def _on_run(self, queued: float, scheduled: float, first: float, last: float) -> None:
        if not scheduled:
            return  # not reported by a custom scheduler
        self._queue.observe(max(0.0, scheduled - queued))
        self._prefill.observe(max(0.0, first - scheduled))
        self._inference.observe(max(0.0, last - scheduled))

    def on_pooled(
        self, finish_reason: str, *, arrival: float, scheduled: float = 0.0, finished: float, prompt_tokens: int
    ) -> None:
        """Record a finished pooling request. Monotonic seconds; `scheduled` 0: unknown."""
        self._success[finish_reason].inc()
        if finish_reason != "stop":
            return
        self._prompt_tokens.inc(prompt_tokens)
        self._prompted += prompt_tokens
        self._on_prompt(prompt_tokens)
        self._end_to_end.observe(max(0.0, finished - arrival))
        self._on_run(arrival, scheduled, finished, finished)

    def set_cache_info(self, info: Mapping[str, object]) -> None:
        """Publish the KV cache configuration."""
        labels = {key: str(value) for key, value in info.items()}
        gauge = Gauge("vllm:cache_config_info", "KV cache configuration.", ("engine", *labels), registry=self.registry)
        gauge.labels(self._engine, *labels.values()).set(1)

    def totals(self) -> Totals:
        """Return the current token counters, for the periodic log line."""
        return Totals(time.monotonic(), self._prompted, self._generated)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, _LABELS, registry=self.registry)
        return counter.labels(self._model_name, self._engine)

    def _seconds(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(name, f"{help} Seconds.", buckets)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help, _LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name, self._engine)


class _WeightedHistogram(Collector):
    """A histogram that observes a value many times at once; the library's takes one observation per call."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...], labels: tuple[str, str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._help, labels=_LABELS)
        family.add_metric(self._labels, list(zip(names, accumulate(self._counts))), self._sum)
        yield family


class _StatsCollector(Collector):
    """Gauges and totals from the engine's latest statistics, read at scrape time."""

    def __init__(self, metrics: Metrics, model_name: str, engine: str) -> None:
        self._metrics = metrics
        self._labels = (model_name, engine)

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for name, help, value in (
            ("num_requests_running", "Running sequences.", float(stats.running)),
            ("num_requests_waiting", "Queued sequences.", float(stats.waiting)),
            ("kv_cache_usage_perc", "Fraction of KV blocks in use (0 to 1).", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        asleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the engine's current state.", labels=(*_LABELS, "sleep_state")
        )
        for level, state in enumerate(SLEEP_STATES):
            asleep.add_metric((*self._labels, state), float(self._metrics.sleep_level == level))
        yield asleep
        for name, help, total in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:num_preemptions", "Preempted sequences.", stats.preemptions),
            ("pagoda:recompiles", "Programs compiled while serving; should be 0.", stats.recompiles),
        ):
            counter = CounterMetricFamily(name, help, labels=_LABELS)
            counter.add_metric(self._labels, total)
            yield counter
