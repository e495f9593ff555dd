"""Metrics of an engine as Python objects: what `get_metrics()` of LLM and LLMEngine returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "vllm:"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position: accepted draft tokens."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations; `buckets`: upper limit ("+Inf" the last) -> number of observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def snapshot(registry: Collector) -> list[Metric]:
    """Return the present values of the metrics whose names begin with `vllm:`."""
    return [metric for family in registry.collect() if family.name.startswith(PREFIX) for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    match family.type:
        case "gauge":
            yield from (Gauge(family.name, dict(sample.labels), sample.value) for sample in _named(family, ""))
        case "counter" if family.name == PER_POSITION:
            yield from _vectors(_named(family, "_total"), family.name)
        case "counter":
            yield from (
                Counter(family.name, dict(sample.labels), int(sample.value)) for sample in _named(family, "_total")
            )
        case "histogram":
            yield from _histograms(family)


def _named(family: Family, suffix: str) -> list[Sample]:
    return [sample for sample in family.samples if sample.name == family.name + suffix]


def _vectors(samples: Iterable[Sample], name: str) -> Iterator[Vector]:
    for labels, group in _grouped(samples, "position"):
        values = {int(position): int(value) for position, value in group.items()}
        yield Vector(name, dict(labels), [values.get(position, 0) for position in range(max(values) + 1)])


def _histograms(family: Family) -> Iterator[Histogram]:
    counts = {_key(sample.labels): sample.value for sample in _named(family, "_count")}
    sums = {_key(sample.labels): sample.value for sample in _named(family, "_sum")}
    for labels, buckets in _grouped(_named(family, "_bucket"), "le"):
        counts_by_limit = {limit: int(count) for limit, count in buckets.items()}
        yield Histogram(family.name, dict(labels), int(counts[labels]), sums[labels], counts_by_limit)


Labels = tuple[tuple[str, str], ...]


def _grouped(samples: Iterable[Sample], label: str) -> Sequence[tuple[Labels, dict[str, float]]]:
    """Return, by the other labels, the values by `label`."""
    groups: dict[Labels, dict[str, float]] = {}
    for sample in samples:
        others = {name: value for name, value in sample.labels.items() if name != label}
        groups.setdefault(_key(others), {})[sample.labels[label]] = sample.value
    return list(groups.items())


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))
