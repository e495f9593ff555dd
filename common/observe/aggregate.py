"""Metrics of several API server processes as one: what each counted is added up, what the engine reports is not.

A snapshot of a process's metrics travels as msgpack. Process 0 sees every step of the engine, so metrics of the engine
are taken from its snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class FamilySnapshot(msgspec.Struct, frozen=True):
    """One metric of a process."""

    name: str
    help: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]  # Name, labels and value of each sample.


def snapshot(metrics: Collector) -> list[FamilySnapshot]:
    """Return the current values of a registry or collector."""
    return [
        FamilySnapshot(
            family.name,
            family.documentation,
            family.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in metrics.collect()
    ]


class Aggregate(Collector):
    """The metrics of all processes. `processes`: their snapshots, that of process 0 first; `engine`: names of metrics
    that process 0 reports for all.
    """

    def __init__(self, processes: Sequence[Iterable[FamilySnapshot]], engine: Collection[str]) -> None:
        self._processes = processes
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        families: dict[str, FamilySnapshot] = {}
        values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
        for index, process in enumerate(self._processes):
            for family in process:
                if index and family.name in self._engine:
                    continue
                families.setdefault(family.name, family)
                merged = values.setdefault(family.name, {})
                for name, labels, value in family.samples:
                    key = (name, frozenset(labels.items()))
                    before = merged.get(key)
                    total = value if before is None else _combined(name, before.value, value)
                    merged[key] = Sample(name, labels, total)
        for name, family in families.items():
            metric = Metric(name, family.help, family.type)
            metric.samples = list(values[name].values())
            yield metric


def _combined(name: str, first: float, second: float) -> float:
    """Return one value for two processes: the earlier of two times, the lower of two limits, else the sum."""
    earliest = name.endswith(("_created", "_start_time_seconds", "_max_fds"))
    return min(first, second) if earliest else first + second
