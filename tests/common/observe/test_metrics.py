import csv
import time
from pathlib import Path

import pytest

from pagoda.common.engine.messages import EngineOutput, EngineStats, StepOutputs
from pagoda.common.observe.metrics import FinishedRequest, FinishedSequence, Metrics


def step(*outputs: EngineOutput, **stats: int) -> StepOutputs:
    return StepOutputs(outputs=list(outputs), stats=EngineStats(**stats))


def output(request_id: str, count: int = 1, finish: str | None = None) -> EngineOutput:
    return EngineOutput(request_id=request_id, new_token_ids=[1] * count, finish_reason=finish)


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.exposition().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def answer(**changes: object) -> FinishedSequence:
    facts = {
        "is_complete": True,
        "scheduled": 1.75,
        "first_token": 2.0,
        "last_token": 6.0,
        "cached_tokens": 4,
        "generation_tokens": 5,
        "preemptions": 0,
    }
    return FinishedSequence(**(facts | changes))


def finished(*answers: FinishedSequence, **changes: object) -> FinishedRequest:
    facts = {"finish_reason": "stop", "arrival": 1.0, "queued": 1.25, "prompt_tokens": 7, "max_tokens": 9}
    return FinishedRequest(**({"n": len(answers)} | facts | changes), sequences=answers)


def observed(metrics: Metrics, *names: str) -> dict[str, tuple[float, float]]:
    """Of each histogram: how many values, and their sum."""
    samples = values(metrics)
    return {name: (samples[f"vllm:{name}_count{LABELS}"], samples[f"vllm:{name}_sum{LABELS}"]) for name in names}


LABELS = '{engine="0",model_name="m"}'


def test_metric_names_types_and_labels() -> None:
    metrics = Metrics("m")
    path = Path(__file__).resolve().parents[2] / "data" / "vllm_metrics.tsv"
    with path.open(newline="") as file:
        known = {row["name"]: row for row in csv.DictReader(file, delimiter="\t")}
    for family in metrics.registry.collect():
        if not family.name.startswith("vllm:"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert known[name]["type"] == family.type
        labels = set(known[name]["labels"].split(",")) - {"le"}
        assert all(set(sample.labels) - {"le"} == labels for sample in family.samples if "created" not in sample.name)


def test_steps_are_counted() -> None:
    metrics = Metrics("m")
    metrics.on_step(step(output("a"), output("b"), running=2, waiting=1, last_step_tokens=9, kv_blocks_total=10))
    metrics.on_step(
        step(
            output("a", 2),
            running=2,
            kv_blocks_used=5,
            kv_blocks_total=10,
            prefix_queries=8,
            prefix_hits=4,
            recompiles=3,
        )
    )
    samples = values(metrics)
    assert samples[f"vllm:generation_tokens_total{LABELS}"] == 4
    assert samples[f"vllm:iteration_tokens_total_sum{LABELS}"] == 9
    assert samples[f"vllm:inter_token_latency_seconds_count{LABELS}"] == 2, "one for each token"
    assert samples[f"vllm:num_requests_running{LABELS}"] == 2
    assert samples[f"vllm:num_requests_waiting{LABELS}"] == 0
    assert samples[f"vllm:kv_cache_usage_perc{LABELS}"] == 0.5
    assert samples[f"vllm:prefix_cache_hits_total{LABELS}"] == 4
    assert samples[f"pagoda:recompiles_total{LABELS}"] == 3


def test_steps_without_output_are_counted() -> None:
    """Parts of a prompt, alone or joined with the step that ends it; an idle engine's report is no step."""
    metrics = Metrics("m")
    metrics.on_step(step(running=1, last_step_tokens=8))
    parts = tuple(EngineStats(running=1, last_step_tokens=tokens) for tokens in (8, 8))
    last = EngineStats(running=1, last_step_tokens=3)
    metrics.on_step(StepOutputs(outputs=[output("a")], stats=last, earlier=parts))
    metrics.on_step(StepOutputs(outputs=[], stats=last, earlier=parts))
    metrics.on_step(step())
    assert observed(metrics, "iteration_tokens_total") == {"iteration_tokens_total": (7, 8 + 2 * (8 + 8 + 3))}


def test_last_token_times_are_bounded() -> None:
    metrics = Metrics("m")
    for number in range(1000):
        metrics.on_step(step(output(str(number)), running=1))
    assert len(metrics._last_tokens) < 100
    metrics.on_step(step(output("z"), running=1))
    metrics.on_step(step(output("z", finish="stop"), running=0))
    assert "z" not in metrics._last_tokens


def test_finished_requests_are_timed() -> None:
    metrics = Metrics("m")
    metrics.on_first_token(arrival=1.0, first_token=2.0, prompt_tokens=7, cached_tokens=4)
    metrics.on_finish(finished(answer()))
    metrics.on_finish(finished(n=1, finish_reason="abort"))
    samples = values(metrics)
    assert samples[f"vllm:time_to_first_token_seconds_sum{LABELS}"] == 1
    assert samples[f"vllm:e2e_request_latency_seconds_sum{LABELS}"] == 5
    assert samples[f"vllm:request_decode_time_seconds_sum{LABELS}"] == 4
    assert samples[f"vllm:request_time_per_output_token_seconds_sum{LABELS}"] == 1
    assert samples[f"vllm:prompt_tokens_total{LABELS}"] == 7
    assert samples[f"vllm:prompt_tokens_cached_total{LABELS}"] == 4
    assert samples['vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}'] == 1
    assert samples['vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'] == 1


PER_ANSWER = (
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds"),
    *("request_decode_time_seconds", "e2e_request_latency_seconds", "request_prefill_kv_computed_tokens"),
    *("request_num_preemptions", "request_generation_tokens", "request_prompt_tokens", "request_params_max_tokens"),
)
PER_REQUEST = ("request_max_num_generation_tokens", "request_params_n")


def test_each_answer_is_timed_from_arrival_to_finish() -> None:
    metrics = Metrics("m")
    second = answer(
        scheduled=3.25, first_token=5.0, last_token=9.0, generation_tokens=3, cached_tokens=6, preemptions=2
    )
    metrics.on_finish(finished(answer(), second))
    assert list(observed(metrics, *PER_ANSWER).values()) == [
        *((2, 0.5 + 2.0), (2, 0.25 + 1.75), (2, 4.25 + 5.75), (2, 4.0 + 4.0), (2, 5.0 + 8.0)),
        *((2, 3 + 1), (2, 0 + 2), (2, 5 + 3), (2, 7 + 7), (2, 9 + 9)),
    ]
    assert list(observed(metrics, *PER_REQUEST).values()) == [(1, 5), (1, 2)]


def test_aborted_answers_are_not_timed() -> None:
    metrics = Metrics("m")
    metrics.on_finish(finished(answer(is_complete=False), finish_reason="abort"))
    assert set(observed(metrics, *PER_ANSWER, *PER_REQUEST).values()) == {(0, 0)}
    metrics.on_finish(finished(answer(), answer(is_complete=False), finish_reason="abort"))
    assert {count for count, _ in observed(metrics, *PER_ANSWER).values()} == {1}, "the other answer was complete"
    assert set(observed(metrics, *PER_REQUEST).values()) == {(0, 0)}


def test_answers_without_a_schedule_time_skip_queue_metrics() -> None:
    metrics = Metrics("m")
    metrics.on_finish(finished(answer(scheduled=0.0)))
    metrics.on_pooled("stop", arrival=1.0, finished=2.0, prompt_tokens=3)
    samples = observed(metrics, *PER_ANSWER)
    assert [count for count, _ in samples.values()] == [0, 0, 0, 1, 2, 2, 2, 1, 2, 1]


def test_pooled_prompts_have_no_token_metrics() -> None:
    metrics = Metrics("m")
    metrics.on_pooled("stop", arrival=1.0, scheduled=1.5, finished=4.0, prompt_tokens=7)
    metrics.on_pooled("abort", arrival=1.0, scheduled=1.5, finished=4.0, prompt_tokens=7)
    assert list(observed(metrics, *PER_ANSWER).values()) == [
        *((1, 0.5), (1, 2.5), (1, 2.5), (0, 0), (1, 3.0)),
        *((1, 7), (1, 0), (0, 0), (1, 7), (0, 0)),
    ]
    assert set(observed(metrics, *PER_REQUEST).values()) == {(0, 0)}


def test_two_registries_in_one_process_are_separate() -> None:
    one, two = Metrics("m"), Metrics("m")
    one.on_step(step(output("a"), running=1))
    assert values(two)[f"vllm:generation_tokens_total{LABELS}"] == 0


def test_cache_config_info() -> None:
    metrics = Metrics("m")
    metrics.set_cache_info({"block_size": 16, "enable_prefix_caching": True})
    assert 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0"} 1.0' in (
        metrics.exposition().decode()
    )


def test_sequences_of_a_batch_are_timed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("m")
    clock = iter([10.0, 10.03, 10.09])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for names in ("ab", "abc", "bc"):
        metrics.on_step(step(*map(output, names), running=3))
    name, labels, samples = "vllm:inter_token_latency_seconds", LABELS.strip("{}"), values(metrics)
    by_bound = {bound: samples[f'{name}_bucket{{{labels.split(",")[0]},le="{bound}",{labels.split(",")[1]}}}']
                for bound in ("0.025", "0.05", "0.075", "+Inf")}  # fmt: skip
    assert list(by_bound.values()) == [0, 2, 4, 4]
    assert samples[f"{name}_count{LABELS}"] == 4
    assert samples[f"{name}_sum{LABELS}"] == pytest.approx(2 * 0.03 + 2 * 0.06)
