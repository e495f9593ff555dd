"""The metrics of one server, from what is recorded to what is printed."""

import csv
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.suite.rows import each_row

from pagoda.common.engine.messages import (
    DRAFT_STATES,
    DraftStats,
    EngineStats,
    FinishedRequest,
    FinishedSequence,
    FirstToken,
    RequestEvents,
    StepOutputs,
)
from pagoda.common.observe.collectors import WITHOUT_SERIES
from pagoda.common.observe.metrics import Metrics
from pagoda.server.vllm.metrics_reader import Vector, snapshot

DATA = Path(__file__).resolve().parents[2] / "data"
LABELS = {"model_name": "m", "engine": "0"}


def rows(name: str, without: Collection[str] = ()) -> list[Any]:
    with (DATA / name).open(newline="") as file:
        found = csv.DictReader(file, delimiter="\t")
        return [pytest.param(row, id=row["name"]) for row in found if row["name"] not in without]


def step(**stats: Any) -> StepOutputs:
    return StepOutputs(stats=EngineStats(**stats))


def sequence(**changes: Any) -> FinishedSequence:
    facts = {
        "replica": 0,
        "finish_reason": "stop",
        "arrival": 1.0,
        "queued": 1.25,
        "scheduled": 1.75,
        "first_token": 2.0,
        "last_token": 6.0,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "preemptions": 0,
        "generation_tokens": 5,
        "max_tokens": 9,
    }
    return FinishedSequence(**(facts | changes))


def recorded(*sequences: FinishedSequence, requests: tuple[FinishedRequest, ...] = ()) -> Metrics:
    metrics, events = Metrics("m"), RequestEvents()
    events.sequences.extend(sequences)
    events.requests.extend(requests)
    metrics.on_events(events)
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm:{name}", LABELS | labels)


def observed(metrics: Metrics, *names: str) -> dict[str, tuple[float | None, float | None]]:
    """Of each histogram: how many values, and their sum."""
    return {name: (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) for name in names}


# --- names, types and labels ---


def complete_metrics() -> Metrics:
    metrics = Metrics("m", max_loras=1)
    metrics.set_cache_info({"block_size": 16})
    return metrics


NEEDS_A_SERVER = ("vllm:cache_config_info",)
"""Metrics whose labels are tested with a server."""

PRINTED = {
    f"{family.name}_total" if family.type == "counter" else family.name: family
    for family in complete_metrics().registry.collect()
}


@each_row("row", rows("vllm_metrics.tsv", without=NEEDS_A_SERVER))
def test_a_metric_of_vllm_has_its_type_and_labels(row: dict[str, str]) -> None:
    family = PRINTED[row["name"]]
    assert family.type == row["type"]
    assert family.samples
    labels = set(row["labels"].split(",")) - {"le"}
    assert all(set(sample.labels) - {"le"} == labels for sample in family.samples)


@each_row("row", rows("interface/metrics.tsv"))
def test_a_metric_of_earlier_versions_of_vllm_has_its_type(row: dict[str, str]) -> None:
    name = row["name"]
    if row["type"] == "counter" and not name.endswith("_total"):
        name += "_total"  # as the client library prints it
    family = PRINTED[name]
    assert family.type == row["type"]
    assert bool(family.samples) == (family.name not in WITHOUT_SERIES and "spec_decode" not in name)


BUCKETS = {
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "request_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 "
    "80",
} | dict.fromkeys(
    [
        "e2e_request_latency_seconds",
        *(f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode", "inference")),
    ],
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
)


@each_row(("name", "bounds"), BUCKETS.items())
def test_buckets_are_those_of_vllm(name: str, bounds: str) -> None:
    samples = PRINTED[f"vllm:{name}"].samples
    found = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
    assert found == [*map(float, bounds.split()), float("inf")]


# --- formats ---


@each_row("accept", ["", "*/*", "text/plain", "text/plain;version=0.0.4;q=0.5, */*;q=0.1"])
def test_the_text_format_is_the_default(accept: str) -> None:
    text, content_type = complete_metrics().exposition(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in parse_text(text.decode())}
    assert families["vllm:prompt_tokens"].type == "counter"


def test_openmetrics_if_the_client_accepts_it() -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    text, content_type = complete_metrics().exposition(accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert text.endswith(b"# EOF\n")
    families = {family.name for family in parse_openmetrics(text.decode())}
    assert {f"{name}_total" if f"{name}_total" in PRINTED else name for name in families} == set(PRINTED)


# --- steps ---


def test_statistics_are_printed() -> None:
    metrics = Metrics("m")
    metrics.on_step(
        step(
            running=2,
            waiting=3,
            deferred=1,
            kv_blocks_used=5,
            kv_blocks_total=10,
            prefix_queries=8,
            prefix_hits=6,
            preemptions=4,
            recompiles=3,
        )
    )
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.5,
        "gpu_cache_usage_perc": 0.5,
        "prefix_cache_queries_total": 8,
        "gpu_prefix_cache_queries_total": 8,
        "prefix_cache_hits_total": 6,
        "gpu_prefix_cache_hits_total": 6,
        "gpu_prefix_cache_hit_rate": 0.75,
        "num_preemptions_total": 4,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    reasons = [value(metrics, "num_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred")]
    assert reasons == [3, 1]
    assert value(metrics, "prompt_tokens_cached_by_source_total", source="device") == 6
    assert metrics.registry.get_sample_value("pagoda:recompiles_total", LABELS) == 3


def test_the_sleep_state_is_printed() -> None:
    metrics = Metrics("m")
    metrics.sleep_level = 2
    states = [
        value(metrics, "engine_sleep_state", sleep_state=state)
        for state in ("awake", "weights_offloaded", "discard_all")
    ]
    assert states == [0, 0, 1]


def test_every_step_is_counted() -> None:
    """Alone or merged with the step after it, with outputs or without; an idle engine's report is no step."""
    metrics = Metrics("m")
    metrics.on_step(step(running=1, last_step_tokens=8))
    parts = tuple(EngineStats(running=1, last_step_tokens=tokens) for tokens in (8, 8))
    metrics.on_step(StepOutputs(stats=EngineStats(running=1, last_step_tokens=3), earlier=parts))
    metrics.on_step(step())
    assert observed(metrics, "iteration_tokens_total") == {"iteration_tokens_total": (4, 8 + 8 + 8 + 3)}


def test_each_replica_has_its_series() -> None:
    metrics, events = Metrics("m", replicas=2), RequestEvents()
    metrics.set_cache_info({"block_size": 16})
    replicas = EngineStats(running=1, last_step_tokens=4), EngineStats(running=2, waiting=3, last_step_tokens=6)
    metrics.on_step(step(running=3, waiting=3, last_step_tokens=10, replicas=replicas))
    events.tokens[1].count += 5
    events.first_tokens.append(FirstToken(replica=1, latency=0.5, prompt_tokens=7, cached_tokens=4))
    events.sequences.append(sequence(replica=1))
    events.requests.append(FinishedRequest(replica=1, n=1, longest=5))
    metrics.on_events(events)
    expected = {
        "num_requests_running": (1, 2),
        "num_requests_waiting": (0, 3),
        "iteration_tokens_total_sum": (4, 6),
        "generation_tokens_total": (0, 5),
        "prompt_tokens_total": (0, 7),
        "time_to_first_token_seconds_count": (0, 1),
        "e2e_request_latency_seconds_count": (0, 1),
        "request_params_n_count": (0, 1),
    }
    for name, values in expected.items():
        assert tuple(value(metrics, name, engine=engine) for engine in "01") == values, name
    info = [
        metrics.registry.get_sample_value("vllm:cache_config_info", {"engine": engine, "block_size": "16"})
        for engine in "01"
    ]
    assert info == [1, 1]


# --- requests ---

PER_SEQUENCE = (
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds"),
    *("request_decode_time_seconds", "e2e_request_latency_seconds", "request_prefill_kv_computed_tokens"),
    *("request_num_preemptions", "request_generation_tokens", "request_prompt_tokens", "request_params_max_tokens"),
    *("request_time_per_output_token_seconds", "time_in_queue_requests"),
)
PER_REQUEST = ("request_max_num_generation_tokens", "request_params_n")


def test_each_sequence_is_timed_from_arrival_to_finish() -> None:
    second = sequence(
        finish_reason="length",
        scheduled=3.25,
        first_token=5.0,
        last_token=9.0,
        generation_tokens=3,
        cached_tokens=6,
        preemptions=2,
    )
    metrics = recorded(sequence(), second, requests=(FinishedRequest(replica=0, n=2, longest=5),))
    assert list(observed(metrics, *PER_SEQUENCE).values()) == [
        *((2, 0.5 + 2.0), (2, 0.25 + 1.75), (2, 4.25 + 5.75), (2, 4.0 + 4.0), (2, 5.0 + 8.0)),
        *((2, 3 + 1), (2, 0 + 2), (2, 5 + 3), (2, 7 + 7), (2, 9 + 9), (2, 1.0 + 2.0), (2, 0.5 + 2.0)),
    ]
    assert list(observed(metrics, *PER_REQUEST).values()) == [(1, 5), (1, 2)]
    assert [value(metrics, "request_success_total", finished_reason=reason) for reason in ("stop", "length")] == [1, 1]


def test_a_sequence_of_one_token_has_no_time_per_token() -> None:
    metrics = recorded(sequence(generation_tokens=1, last_token=2.0))
    assert observed(metrics, "request_time_per_output_token_seconds").popitem()[1] == (1, 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_sequences_that_are_not_complete_are_counted_not_timed(reason: str) -> None:
    metrics = recorded(sequence(finish_reason=reason))
    assert set(observed(metrics, *PER_SEQUENCE, *PER_REQUEST).values()) == {(0, 0)}
    assert value(metrics, "request_success_total", finished_reason=reason) == 1


def test_sequences_without_a_schedule_time_skip_queue_metrics() -> None:
    samples = observed(recorded(sequence(scheduled=0.0)), *PER_SEQUENCE)
    assert [count for count, _ in samples.values()] == [0, 0, 0, *[1] * 8, 0]


def test_pooling_requests_have_no_token_metrics() -> None:
    pooled = sequence(generation_tokens=None, max_tokens=None, first_token=6.0, cached_tokens=0)
    metrics = recorded(pooled)
    generates = ("decode", "generation_tokens", "params", "output_token")
    for name, (count, _) in observed(metrics, *PER_SEQUENCE, *PER_REQUEST).items():
        assert count == (not any(word in name for word in generates)), name


def test_first_tokens_count_the_prompt() -> None:
    metrics, events = Metrics("m"), RequestEvents()
    events.first_tokens.append(FirstToken(replica=0, latency=0.5, prompt_tokens=7, cached_tokens=4))
    events.first_tokens.append(FirstToken(replica=0, latency=None, prompt_tokens=2, cached_tokens=0))
    metrics.on_events(events)
    assert value(metrics, "prompt_tokens_total") == 9
    assert value(metrics, "prompt_tokens_cached_total") == 4
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value(metrics, "prompt_tokens_by_source_total", source=source) for source in sources] == [5, 4, 0]
    assert observed(metrics, "time_to_first_token_seconds").popitem()[1] == (1, 0.5)
    assert metrics.totals().prompt_tokens == 9


def test_the_time_between_tokens_is_weighted_by_tokens() -> None:
    metrics, events = Metrics("m"), RequestEvents()
    events.tokens[0].count = 7
    events.tokens[0].waits.update({0.03: 2, 0.06: 4})
    metrics.on_events(events)
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        by_bound = [value(metrics, f"{name}_bucket", le=bound) for bound in ("0.025", "0.05", "0.075", "+Inf")]
        assert by_bound == [0, 2, 6, 6]
        assert value(metrics, f"{name}_count") == 6
        assert value(metrics, f"{name}_sum") == pytest.approx(2 * 0.03 + 4 * 0.06)
    assert value(metrics, "generation_tokens_total") == metrics.totals().generation_tokens == 7


def test_two_registries_in_one_process_are_separate() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.on_step(step(running=1))
    assert value(two, "num_requests_running") == 0


# --- speculative decoding ---

DRAFTED = DraftStats(drafts=10, tokens=30, accepted=(9, 6, 3), steps=(8, 4, 2, 1))


def test_drafts_are_counted_under_the_names_of_vllm() -> None:
    metrics = Metrics("m")
    metrics.on_step(StepOutputs(stats=EngineStats(drafts=DRAFTED)))
    assert {
        name: value(metrics, f"spec_decode_{name}")
        for name in (
            *("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "num_emitted_tokens_total"),
            *("draft_acceptance_rate", "efficiency"),
        )
    } == {
        "num_drafts_total": 10,
        "num_draft_tokens_total": 30,
        "num_accepted_tokens_total": 18,
        "num_emitted_tokens_total": 28,
        "draft_acceptance_rate": 0.6,
        "efficiency": 0.7,
    }
    positions = [value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert positions == [9, 6, 3]
    steps = {
        outcome: metrics.registry.get_sample_value("pagoda:spec_decode_steps_total", LABELS | {"outcome": outcome})
        for outcome in DRAFT_STATES
    }
    assert steps == {"drafted": 8, "no_match": 4, "acceptance": 2, "batch_size": 1}
    vector = next(each for each in snapshot(metrics.registry) if each.name.endswith("_per_pos"))
    assert vector == Vector("vllm:spec_decode_num_accepted_tokens_per_pos", LABELS, [9, 6, 3])


def test_drafts_have_no_series_without_speculation() -> None:
    metrics = Metrics("m")
    metrics.on_step(StepOutputs(stats=EngineStats(running=1)))
    families = [family for family in metrics.registry.collect() if "spec_decode" in family.name]
    assert len(families) == 8
    assert not any(family.samples for family in families)


def test_drafts_of_replicas_are_added() -> None:
    other = DraftStats(drafts=1, tokens=5, accepted=(1, 1, 1, 1), steps=(1, 0, 0, 0))
    total = DRAFTED + other
    assert total == DraftStats(drafts=11, tokens=35, accepted=(10, 7, 4, 1), steps=(9, 4, 2, 1))
    assert total.since(DRAFTED) == other
    assert (DRAFTED.num_accepted, DRAFTED.mean_length, DraftStats().mean_length) == (18, 2.8, 1.0)
