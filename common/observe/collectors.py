"""Metrics computed at scrape time: from the engine's statistics, under former names, and of absent features."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.common.engine.messages import DRAFT_STATES, DraftStats, EngineStats

LABELS: Final = ("model_name", "engine")
"""Of every metric of an engine. `engine`: the number of the data-parallel replica."""

SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
"""Indexed by sleep level; 0: awake."""


@dataclass(frozen=True, slots=True)
class _FromStats:
    """A metric of one replica's statistics. With `label`, `values` returns one value per value of that label.

    None: no series, because the feature is off.
    """

    type: Literal["gauge", "counter"]
    name: str
    help: str
    values: Callable[[EngineStats], float | Mapping[str, float] | None]
    label: str | None = None


def _hit_rate(stats: EngineStats) -> float:
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def _cached_by_source(stats: EngineStats) -> dict[str, float]:
    return {"device": stats.prefix_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}


_FROM_STATS: Final = (
    _FromStats("gauge", "vllm:num_requests_running", "Running sequences.", lambda stats: stats.running),
    _FromStats(
        "gauge",
        "vllm:num_requests_waiting",
        "Queued sequences.",
        lambda stats: stats.waiting + stats.deferred,
    ),
    _FromStats(
        "gauge",
        "vllm:num_requests_waiting_by_reason",
        "Queued sequences, by reason: capacity (no free slot or KV block) or deferred (its grammar is being compiled).",
        lambda stats: {"capacity": stats.waiting, "deferred": stats.deferred},
        "reason",
    ),
    _FromStats(
        "gauge",
        "vllm:num_requests_swapped",
        "Always 0: preempted sequences are recomputed, not swapped.",
        lambda stats: 0,
    ),
    _FromStats(
        "gauge", "vllm:kv_cache_usage_perc", "Fraction of KV blocks in use (0 to 1).", lambda stats: stats.kv_usage
    ),
    _FromStats(
        "gauge", "vllm:gpu_cache_usage_perc", "Former name of vllm:kv_cache_usage_perc.", lambda stats: stats.kv_usage
    ),
    _FromStats(
        "gauge", "vllm:cpu_cache_usage_perc", "Always 0: no KV blocks are kept in host memory.", lambda stats: 0
    ),
    _FromStats(
        "gauge",
        "vllm:gpu_prefix_cache_hit_rate",
        "Fraction of the prompt tokens looked up that were in the prefix cache, since start.",
        _hit_rate,
    ),
    _FromStats(
        "gauge", "vllm:cpu_prefix_cache_hit_rate", "Always -1: there is no such cache in host memory.", lambda stats: -1
    ),
    _FromStats(
        "counter",
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_queries,
    ),
    _FromStats(
        "counter",
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hits,
    ),
    _FromStats(
        "counter",
        "pagoda:prefix_cache_tokens_without_state",
        "Prompt tokens computed again, though their keys and values were in the prefix cache, since no recurrent state "
        "was kept after them.",
        lambda stats: stats.prefix_without_state,
    ),
    _FromStats(
        "counter",
        "vllm:gpu_prefix_cache_queries",
        "Former name of vllm:prefix_cache_queries.",
        lambda stats: stats.prefix_queries,
    ),
    _FromStats(
        "counter",
        "vllm:gpu_prefix_cache_hits",
        "Former name of vllm:prefix_cache_hits.",
        lambda stats: stats.prefix_hits,
    ),
    _FromStats(
        "counter",
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found in a prefix cache, by the memory it is in. There is only the device's.",
        _cached_by_source,
        "source",
    ),
    _FromStats("counter", "vllm:num_preemptions", "Preempted sequences.", lambda stats: stats.preemptions),
    _FromStats(
        "counter",
        "pagoda:recompiles",
        "Programs compiled while serving; should be 0.",
        lambda stats: stats.recompiles,
    ),
)


def _of_drafts(
    type: Literal["gauge", "counter"],
    name: str,
    help: str,
    values: Callable[[DraftStats], float | Mapping[str, float]],
    label: str | None = None,
) -> _FromStats:
    """Return a metric that has series with --speculative-config only."""
    return _FromStats(type, name, help, lambda stats: None if stats.drafts is None else values(stats.drafts), label)


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


_FROM_DRAFTS: Final = (
    _of_drafts(
        "counter",
        "vllm:spec_decode_num_drafts",
        "Drafts: sequences that had draft tokens in a step.",
        lambda drafts: drafts.drafts,
    ),
    _of_drafts("counter", "vllm:spec_decode_num_draft_tokens", "Draft tokens proposed.", lambda drafts: drafts.tokens),
    _of_drafts(
        "counter", "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda drafts: drafts.num_accepted
    ),
    _of_drafts(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft.",
        lambda drafts: {str(position): count for position, count in enumerate(drafts.accepted)},
        "position",
    ),
    _of_drafts(
        "counter",
        "vllm:spec_decode_num_emitted_tokens",
        "Tokens generated by sequences with drafts: the accepted ones, and one after each draft.",
        lambda drafts: drafts.num_accepted + drafts.drafts,
    ),
    _of_drafts(
        "gauge",
        "vllm:spec_decode_draft_acceptance_rate",
        "Fraction of the draft tokens that were accepted, since start.",
        lambda drafts: _ratio(drafts.num_accepted, drafts.tokens),
    ),
    _of_drafts(
        "gauge",
        "vllm:spec_decode_efficiency",
        "Tokens generated by sequences with drafts per token they could have generated, since start.",
        lambda drafts: _ratio(drafts.num_accepted + drafts.drafts, drafts.tokens + drafts.drafts),
    ),
    _of_drafts(
        "counter",
        "pagoda:spec_decode_steps",
        "Steps in which sequences could have drafts, by outcome: drafted, no_match (the proposer had no guess), "
        "acceptance (none would pay at the acceptance so far) or batch_size (disable_by_batch_size).",
        lambda drafts: dict(zip(DRAFT_STATES, drafts.steps)),
        "outcome",
    ),
)
"""Metrics of speculative decoding. vLLM prints some of them without a series while it is off."""


class StatsCollector(Collector):
    """Gauges and totals from the latest statistics. `state` returns them and the sleep level."""

    def __init__(
        self, model_name: str, replicas: int, state: Callable[[], tuple[EngineStats, int]], max_loras: int = 0
    ) -> None:
        """`max_loras`: LoRA adapters that a batch may use."""
        self._model_name = model_name
        self._replicas = replicas
        self._state = state
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        stats, sleep_level = self._state()
        parts = stats.replicas or (stats, *(EngineStats() for _ in range(self._replicas - 1)))
        for metric in (*_FROM_STATS, *_FROM_DRAFTS):
            yield self._family(metric, parts)
        asleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the engine's current state.", labels=(*LABELS, "sleep_state")
        )
        for index in range(self._replicas):
            for level, name in enumerate(SLEEP_STATES):
                asleep.add_metric((self._model_name, str(index), name), float(sleep_level == level))
        yield asleep
        yield self._adapters(parts)

    def _adapters(self, parts: Sequence[EngineStats]) -> Metric:
        """Return the adapters in use, as labels; the value is the time, as in vLLM. No series without --enable-lora."""
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters of running requests.", labels=labels)
        if self._max_loras:
            running, waiting = (
                ",".join(sorted({name for part in parts for name in of(part)})) for of in (_running, _waiting)
            )
            family.add_metric((str(self._max_loras), waiting, running), time.time())
        return family

    def _family(self, metric: _FromStats, parts: Sequence[EngineStats]) -> Metric:
        labels = LABELS if metric.label is None else (*LABELS, metric.label)
        make = GaugeMetricFamily if metric.type == "gauge" else CounterMetricFamily
        family = make(metric.name, metric.help, labels=labels)
        for index, stats in enumerate(parts):
            values = metric.values(stats)
            if values is None:
                continue
            if isinstance(values, Mapping):
                for label, value in values.items():
                    family.add_metric((self._model_name, str(index), label), value)
            else:
                family.add_metric((self._model_name, str(index)), values)
        return family


def _running(stats: EngineStats) -> tuple[str, ...]:
    return stats.running_adapters


def _waiting(stats: EngineStats) -> tuple[str, ...]:
    return stats.waiting_adapters


class FormerName(Collector):
    """A metric under the name that it had in earlier versions of vLLM, which their dashboards use."""

    def __init__(self, name: str, current: Collector) -> None:
        self._name = name
        self._current = current

    def collect(self) -> Iterator[Metric]:
        for family in self._current.collect():
            renamed = Metric(self._name, f"Former name of {family.name}.", family.type)
            renamed.samples = [
                sample._replace(name=self._name + sample.name.removeprefix(family.name)) for sample in family.samples
            ]
            yield renamed


# What is not measured, because the feature does not exist.

_NO_CONNECTOR: Final = "Always 0: there is no KV connector."
_NO_MEDIA: Final = "Always 0: there are no multimodal models."
_NO_MFU: Final = "Always 0: it is not estimated (--enable-mfu-metrics is refused)."

ALWAYS_ZERO: Final[Mapping[str, str]] = {
    "vllm:external_prefix_cache_queries": _NO_CONNECTOR,
    "vllm:external_prefix_cache_hits": _NO_CONNECTOR,
    "vllm:mm_cache_queries": _NO_MEDIA,
    "vllm:mm_cache_hits": _NO_MEDIA,
    "vllm:estimated_flops_per_gpu": _NO_MFU,
    "vllm:estimated_read_bytes_per_gpu": _NO_MFU,
    "vllm:estimated_write_bytes_per_gpu": _NO_MFU,
}
"""Counters that vLLM prints, with 0, while their feature is off -> help."""

_NO_DETAILED_TRACES: Final = "No series: vLLM measures it with detailed traces, which do not exist."

WITHOUT_SERIES: Final[Mapping[str, tuple[str, str]]] = {
    "vllm:model_forward_time_milliseconds": ("histogram", _NO_DETAILED_TRACES),
    "vllm:model_execute_time_milliseconds": ("histogram", _NO_DETAILED_TRACES),
}
"""Metrics that vLLM prints without a series while their feature is off -> type and help."""


class AbsentFeatures(Collector):
    """The metrics of ALWAYS_ZERO and WITHOUT_SERIES."""

    def __init__(self, model_name: str, replicas: int) -> None:
        self._labels = [(model_name, str(index)) for index in range(replicas)]

    def collect(self) -> Iterator[Metric]:
        for name, help in ALWAYS_ZERO.items():
            counter = CounterMetricFamily(name, help, labels=LABELS)
            for labels in self._labels:
                counter.add_metric(labels, 0)
            yield counter
        for name, (kind, help) in WITHOUT_SERIES.items():
            yield Metric(name, help, kind)
