"""Metrics of several processes as one."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagoda.common.engine.messages import EngineStats, ReplicaTokens, RequestEvents, StepOutputs
from pagoda.common.observe.aggregate import Aggregate, FamilySnapshot, snapshot
from pagoda.common.observe.metrics import Metrics


def process(number: int) -> list[FamilySnapshot]:
    registry = CollectorRegistry()
    counter = Counter("done", "Done.", ("kind",), registry=registry)
    counter.labels("a").inc(number)
    if number > 1:
        counter.labels("b").inc(10)
    Gauge("level", "Of the engine.", registry=registry).set(number)
    Histogram("size", "Size.", buckets=(1, 2), registry=registry).observe(number)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(100 * number)
    return snapshot(registry)


def samples(aggregate: Aggregate) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in aggregate.collect()
        for sample in family.samples
    }


def test_counts_are_added_and_the_engines_metrics_are_those_of_process_0() -> None:
    merged = samples(Aggregate([process(1), process(2)], {"level"}))
    assert merged["done_total", "a"] == 3
    assert merged["done_total", "b"] == 10
    assert merged["level", ""] == 1
    assert merged["size_bucket", "1.0"] == 1
    assert merged["size_bucket", "2.0"] == merged["size_bucket", "+Inf"] == merged["size_count", ""] == 2
    assert merged["size_sum", ""] == 3
    assert merged["process_start_time_seconds", ""] == 100
    assert merged["done_created", "a"] > 1e9  # a time is no sum
    assert merged["done_created", "a"] < 3e9


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_the_metrics_of_one_process_are_exposed_as_without_aggregation(accept: str) -> None:
    metrics = Metrics("m", replicas=2)
    metrics.on_rejected("max_num_queued_reqs")
    metrics.on_step(StepOutputs(stats=EngineStats(running=2, last_step_tokens=5)))
    metrics.set_cache_info({"block_size": 4})

    def lines(text: bytes) -> list[str]:
        return sorted(
            line for line in text.decode().splitlines() if not line.startswith(("process_", "# HELP process"))
        )

    alone, kind = metrics.exposition(accept)
    together, other = metrics.exposition(accept, [metrics.snapshot()])
    assert kind == other
    assert lines(alone) == lines(together)


def test_several_processes_of_a_server() -> None:
    first, second = Metrics("m"), Metrics("m")
    for metrics in (first, second):  # both report the same step of one engine
        metrics.on_step(StepOutputs(stats=EngineStats(running=3, prefix_queries=9, last_step_tokens=5)))
        events = RequestEvents()
        events.tokens[0] = ReplicaTokens(count=4)
        metrics.on_events(events)
    text = second.exposition("", [first.snapshot(), second.snapshot()])[0].decode()
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 8.0' in text
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in text
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9.0' in text
    assert 'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 5.0' in text
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1
