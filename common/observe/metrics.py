"""Prometheus metrics of one server, in a separate registry, under vLLM's names where vLLM has them.

Labels come from closed sets: served model name, data-parallel replica (`engine`), finish reason and the like.
`collectors` has what is computed at scrape time, and lists what vLLM has and pagoda does not measure.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagoda.common.engine.messages import (
    REJECTION_REASONS,
    EngineStats,
    FinishedSequence,
    FirstToken,
    ReplicaTokens,
    RequestEvents,
    StepOutputs,
)
from pagoda.common.observe.aggregate import Aggregate, FamilySnapshot, snapshot
from pagoda.common.observe.collectors import LABELS, AbsentFeatures, FormerName, StatsCollector
from pagoda.common.observe.logs import Totals

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")

IGNORED_KINDS: Final = ("unknown", "hint", "tool", "item")
"""Kinds of request parts that are accepted and ignored."""

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
_ADAPTER_TOKENS: Final = ("prompt", "generation")
_CHOICES: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)


class Metrics:
    """All metrics of one server. `replicas`: data-parallel copies of the model, each with series of its own.

    `max_loras`: LoRA adapters that a batch may use.
    """

    def __init__(self, model_name: str, replicas: int = 1, max_loras: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.stats = EngineStats()
        self.sleep_level = 0
        self._generated = self._prompted = 0
        ProcessCollector(registry=self.registry)
        stats = StatsCollector(model_name, replicas, lambda: (self.stats, self.sleep_level), max_loras)
        self.registry.register(stats)
        parents = _Parents(self.registry)
        self._replicas = [_ReplicaSeries(parents, model_name, str(index)) for index in range(replicas)]
        self.registry.register(FormerName("vllm:time_per_output_token_seconds", parents.inter_token))
        self.registry.register(FormerName("vllm:time_in_queue_requests", parents.queue))
        absent = AbsentFeatures(model_name, replicas)
        self.registry.register(absent)
        self._of_engine: list[Collector] = [stats, parents.step_tokens, absent]

        rejections = self._counter("vllm:admission_rejections", "Requests refused (429), by limit.", "reason")
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in REJECTION_REASONS}
        self._adapter_tokens = self._counter(
            "pagoda:lora_tokens", "Tokens of finished sequences of each LoRA adapter, by kind.", "lora_name", "kind"
        )
        restarts = self._counter("pagoda:engine_restarts", "Engines that ended and were replaced (--restart-engine).")
        self._restarts = restarts.labels(model_name)
        self._of_engine.append(restarts)
        ignored = self._counter(
            "pagoda:ignored_request_parts",
            "Request fields, hints and tools accepted and ignored, by kind.",
            *("engine", "kind"),
        )
        self._ignored = {kind: ignored.labels(model_name, "0", kind) for kind in IGNORED_KINDS}

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, ("model_name", *labels), registry=self.registry)

    def on_ignored(self, kinds: Iterable[str]) -> None:
        """Count the ignored parts of a request; each kind is one of IGNORED_KINDS."""
        for kind in kinds:
            self._ignored[kind].inc()

    def on_rejected(self, reason: str) -> None:
        """Count a prompt that the queue has no room for; the reason is one of REJECTION_REASONS."""
        self._rejections[reason].inc()

    def on_restart(self) -> None:
        """Count an engine that ended and is being replaced."""
        self._restarts.inc()

    def on_step(self, step: StepOutputs) -> None:
        """Record one engine step, or several merged ones. An idle engine's report is not a step."""
        self.stats = step.stats
        for stats in (*step.earlier, step.stats):
            for series, replica_stats in zip(self._replicas, stats.replicas or (stats,)):
                if replica_stats.last_step_tokens:
                    series.step_tokens.observe(replica_stats.last_step_tokens)

    def on_events(self, events: RequestEvents) -> None:
        """Record what happened to requests."""
        for replica, tokens in events.tokens.items():
            self._replicas[replica].on_tokens(tokens)
            self._generated += tokens.count
        for first in events.first_tokens:
            self._replicas[first.replica].on_first_token(first)
            self._prompted += first.prompt_tokens
        for sequence in events.sequences:
            self._replicas[sequence.replica].on_sequence(sequence)
            if sequence.adapter is not None:
                self._on_adapted(sequence, sequence.adapter)
        for request in events.requests:
            self._replicas[request.replica].params_n.observe(request.n)
            self._replicas[request.replica].longest.observe(request.longest)

    def forget_adapter(self, name: str) -> None:
        """Remove the series of an adapter that is served no longer."""
        for kind in _ADAPTER_TOKENS:
            with suppress(KeyError):  # The model has served no request.
                self._adapter_tokens.remove(self.model_name, name, kind)

    def _on_adapted(self, sequence: FinishedSequence, name: str) -> None:
        for kind, tokens in zip(_ADAPTER_TOKENS, (sequence.prompt_tokens, sequence.generation_tokens or 0)):
            self._adapter_tokens.labels(self.model_name, name, kind).inc(tokens)

    def set_cache_info(self, info: Mapping[str, object]) -> None:
        """Publish the KV cache configuration of each replica."""
        labels = {key: str(value) for key, value in info.items()}
        gauge = Gauge("vllm:cache_config_info", "KV cache configuration.", ("engine", *labels), registry=self.registry)
        for index in range(len(self._replicas)):
            gauge.labels(str(index), *labels.values()).set(1)
        self._of_engine.append(gauge)

    def totals(self) -> Totals:
        """Return the current token counters, for the periodic log line."""
        return Totals(time.monotonic(), self._prompted, self._generated, self.stats.drafts)

    def snapshot(self) -> list[FamilySnapshot]:
        """Return the current values, to be added up with those of other processes."""
        return snapshot(self.registry)

    def exposition(
        self, accept: str = "", processes: Sequence[Sequence[FamilySnapshot]] | None = None
    ) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if the Accept header lists it, else Prometheus' text
        format. `processes`: snapshots of all API server processes, that of process 0 first.
        """
        registry: Any = self.registry
        if processes is not None:
            engine = {family.name for collector in self._of_engine for family in collector.collect()}
            registry = Aggregate(processes, engine)
        if any(
            media_type.partition(";")[0].strip() == "application/openmetrics-text" for media_type in accept.split(",")
        ):
            # The library's default escaping makes vllm_ of vllm:, though colons are valid.
            text = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


class _Parents:
    """The metrics that have one series per replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", help, (*LABELS, *labels), registry=registry)

        def histogram(name: str, help: str, bounds: tuple[float, ...]) -> _Histogram:
            created = _Histogram(f"vllm:{name}", help, bounds)
            registry.register(created)
            return created

        def seconds(name: str, help: str, bounds: tuple[float, ...] = _REQUEST_SECONDS) -> _Histogram:
            return histogram(f"{name}_seconds", f"{help} Seconds.", bounds)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences with a first token.")
        self.by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens of sequences with a first token, by source.", "source"
        )
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.success = counter("request_success", "Finished sequences, by reason.", "finished_reason")
        self.step_tokens = histogram(
            "iteration_tokens_total", "Prompt tokens computed plus tokens generated, per engine step.", _STEP_TOKENS
        )
        self.first_token = seconds("time_to_first_token", "Arrival to first token.", _FIRST_TOKEN_SECONDS)
        self.inter_token = seconds("inter_token_latency", "Time between tokens of a sequence.", _TOKEN_SECONDS)
        self.per_token = seconds(
            "request_time_per_output_token", "Mean time per token after the first; 0 without one.", _TOKEN_SECONDS
        )
        self.end_to_end = seconds("e2e_request_latency", "Arrival to last token.")
        self.decode = seconds("request_decode_time", "First to last token.")
        self.queue = seconds("request_queue_time", "Sent to the engine to scheduled.")
        self.prefill = seconds("request_prefill_time", "Scheduled to first token.")
        self.inference = seconds("request_inference_time", "Scheduled to last token.")
        self.preemptions = histogram("request_num_preemptions", "Preemptions per sequence.", _PREEMPTIONS)
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, not found in the prefix cache.", _LENGTHS
        )
        self.longest = histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest sequence of a request.", _LENGTHS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens per sequence.", _LENGTHS)
        self.generated_length = histogram("request_generation_tokens", "Generated tokens per sequence.", _LENGTHS)
        self.params_n = histogram("request_params_n", "n per request.", _CHOICES)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens per sequence.", _LENGTHS)


class _ReplicaSeries:
    """The series of one replica."""

    def __init__(self, parents: _Parents, *labels: str) -> None:
        self._prompt_tokens = parents.prompt_tokens.labels(*labels)
        self._computed_here = parents.by_source.labels(*labels, "local_compute")
        self._cached_here = parents.by_source.labels(*labels, "local_cache_hit")
        parents.by_source.labels(*labels, "external_kv_transfer")  # It stays 0: there is no KV connector.
        self._cached_tokens = parents.cached_tokens.labels(*labels)
        self._generation_tokens = parents.generation_tokens.labels(*labels)
        self._success = {reason: parents.success.labels(*labels, reason) for reason in FINISH_REASONS}
        self.step_tokens = parents.step_tokens.labels(*labels)
        self._first_token = parents.first_token.labels(*labels)
        self._inter_token = parents.inter_token.labels(*labels)
        self._per_token = parents.per_token.labels(*labels)
        self._end_to_end = parents.end_to_end.labels(*labels)
        self._decode = parents.decode.labels(*labels)
        self._queue = parents.queue.labels(*labels)
        self._prefill = parents.prefill.labels(*labels)
        self._inference = parents.inference.labels(*labels)
        self._preemptions = parents.preemptions.labels(*labels)
        self._computed = parents.computed.labels(*labels)
        self.longest = parents.longest.labels(*labels)
        self._prompt_length = parents.prompt_length.labels(*labels)
        self._generated_length = parents.generated_length.labels(*labels)
        self.params_n = parents.params_n.labels(*labels)
        self._max_tokens = parents.max_tokens.labels(*labels)

    def on_tokens(self, tokens: ReplicaTokens) -> None:
        self._generation_tokens.inc(tokens.count)
        for wait, times in tokens.waits.items():
            self._inter_token.observe(wait, times)

    def on_first_token(self, first: FirstToken) -> None:
        self._prompt_tokens.inc(first.prompt_tokens)
        self._computed_here.inc(first.prompt_tokens - first.cached_tokens)
        self._cached_here.inc(first.cached_tokens)
        self._cached_tokens.inc(first.cached_tokens)
        if first.latency is not None:
            self._first_token.observe(first.latency)

    def on_sequence(self, sequence: FinishedSequence) -> None:
        """Count a sequence, and time it unless it was aborted."""
        self._success[sequence.finish_reason].inc()
        if sequence.finish_reason in ("abort", "error") or not sequence.first_token:
            return
        self._prompt_length.observe(sequence.prompt_tokens)
        self._computed.observe(sequence.prompt_tokens - sequence.cached_tokens)
        self._preemptions.observe(sequence.preemptions)
        self._end_to_end.observe(max(0.0, sequence.last_token - sequence.arrival))
        if sequence.scheduled:
            self._queue.observe(max(0.0, sequence.scheduled - sequence.queued))
            self._prefill.observe(max(0.0, sequence.first_token - sequence.scheduled))
            self._inference.observe(max(0.0, sequence.last_token - sequence.scheduled))
        if sequence.generation_tokens is not None:
            self._on_generated(sequence, sequence.generation_tokens)

    def _on_generated(self, sequence: FinishedSequence, tokens: int) -> None:
        decode = max(0.0, sequence.last_token - sequence.first_token)
        self._decode.observe(decode)
        self._per_token.observe(decode / (tokens - 1) if tokens > 1 else 0.0)
        self._generated_length.observe(tokens)
        if sequence.max_tokens is not None:
            self._max_tokens.observe(sequence.max_tokens)


class _HistogramSeries:
    """Observations of one label set. Only one thread observes."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class _Histogram(Collector):
    """A histogram without locks that observes a value many times at once.

    The library's takes 2.4 us per observation, of which a request makes 15.
    """

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._series: dict[tuple[str, ...], _HistogramSeries] = {}

    def labels(self, *labels: str) -> _HistogramSeries:
        """Return the series of a label set."""
        return self._series.setdefault(labels, _HistogramSeries(self._bounds))

    def collect(self) -> Iterator[Metric]:
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._help, labels=LABELS)
        for labels, series in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(series.counts))), series.sum)
        yield family
