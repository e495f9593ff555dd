"""`pagoda plan`: published figures, targets, what fits, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.common.engine.workload.capacity import PlannedLoad, ServiceTarget
from pagoda.common.errors import ConfigError
from pagoda.server.cli.capacity.plan import Planning, Row
from pagoda.server.cli.capacity.planned_load import parse_target, parse_workload
from pagoda.server.cli.main import main

MODELS = Path(__file__).parents[2] / "data" / "models"
LLAMA, QWEN = str(MODELS / "llama-3.1-8b"), str(MODELS / "qwen3-8b")


def plan(folder: Path, *words: str, status: int = 0) -> list[dict[str, Any]]:
    """The rows of a plan."""
    output = folder / "plan.json"
    assert main(["plan", *words, "--output-json", str(output)]) == status
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return rows


# Published figures. None of the efficiencies is fitted to them.


@pytest.mark.command("plan")
@pytest.mark.setting("--workload", "--num-prompts", "--hardware", "--output-json")
def test_sglang_qwen3_8b_on_an_h200(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 requests of 1024/1024: 30.85 s with FlashInfer, 34.7 s with FA3, 36.9 s with Triton."""
    words = ("--hardware", "h200", "-tp", "1", "--workload", "random:1024/1024", "--num-prompts", "256")
    (row,) = plan(tmp_path, QWEN, *words, "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
    for published in (30.85, 34.7, 36.9):
        assert row["replica"]["seconds"] == pytest.approx(published, rel=0.25)
    shown = capsys.readouterr().out
    assert "assumed:" in shown
    assert "256 requests, all arriving at once; prompts of 1024 tokens and outputs of 1024 on average" in shown
    assert "h200: 989 (8 bits 1,979) TFLOP/s, 140 GiB (by default 90% of it used) at 4,800 GB/s" in shown
    assert "reached of these: products 62%" in shown


def test_tpu_inference_llama_8b_on_a_v6e(tmp_path: Path) -> None:
    """1800/128, 256 sequences and 1,024 tokens per step: 14.64 requests/s."""
    limits = ("--max-num-seqs", "256", "--max-num-batched-tokens", "1024", "--max-model-len", "2048")
    words = ("--hardware", "v6e", "-tp", "1", "--workload", "random:1800/128", "--num-prompts", "500", *limits)
    (row,) = plan(tmp_path, LLAMA, *words, "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.9")
    assert row["requests_per_second_per_replica"] == pytest.approx(14.64, rel=0.25)


def test_a_cause_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/there/is/none"]) == 1
    assert capsys.readouterr() == (
        "",
        "pagoda: error: /there/is/none: no such file or folder; give a local folder, a "
        ".gguf file or a hub id such as org/name\n",
    )
    rows = plan(tmp_path, QWEN, "--hardware", "h100,h200", "--quantization", "gptq", status=1)
    shown = capsys.readouterr().out
    (why,) = {row["why_not"] for row in rows}
    assert shown.count(why) == 1
    assert f"h100 x 8, h200 x 8: {why}" in shown


# Targets.


@pytest.mark.setting("--slo", "--slo-percentile", "--request-rate", "--price")
def test_replicas_for_a_rate_within_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"h100": 2.5, "a100": 1.5}')
    words = [LLAMA, "--hardware", "a100,H100", "-tp", "1", "--workload", "random:400/60", "--num-prompts", "300"]
    words += ["--max-num-seqs", "64", "--max-num-batched-tokens", "1024"]
    rows = plan(tmp_path, *words, "--slo", "ttft=300ms,tpot=30ms", "--request-rate", "150", "--price", str(prices))
    assert {row["hardware"] for row in rows} == {"a100", "h100"}
    for row in rows:
        assert row["replica"]["percentile_ttft_ms"] <= 300
        assert row["cluster"]["percentile_ttft_ms"] <= 300
        assert row["cluster"]["percentile_tpot_ms"] <= 30
        assert row["chips"] == row["replicas"] > 1
        assert row["price_per_hour"] == row["chips"] * {"a100": 1.5, "h100": 2.5}[row["hardware"]]
    by_name = {row["hardware"]: row for row in rows}
    assert by_name["h100"]["requests_per_second_per_replica"] > by_name["a100"]["requests_per_second_per_replica"]
    assert [row["chips"] for row in rows] == sorted(row["chips"] for row in rows)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:5] == ["hardware", "tp", "replicas", "chips", "price/h"]


def test_more_requests_are_served_where_half_of_them_may_wait_longer(tmp_path: Path) -> None:
    words = [LLAMA, "--hardware", "h100", "-tp", "1", "--workload", "random:400/60", "--num-prompts", "300"]
    words += ["--max-num-seqs", "64", "--max-num-batched-tokens", "1024", "--slo", "ttft=40ms"]
    median, usual = (plan(tmp_path, *words, "--slo-percentile", each) for each in ("50", "95"))
    assert median[0]["requests_per_second_per_replica"] > usual[0]["requests_per_second_per_replica"]


def test_targets_that_no_rate_meets_and_models_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
    words = (LLAMA, "--workload", "random:400/20", "--num-prompts", "20", "-tp", "1", *limits)
    rows = plan(tmp_path, *words, "--hardware", "v5e,l4", "--slo", "tpot=10ms", status=1)
    why = {row["hardware"]: row["why_not"] for row in rows}
    assert "does not fit 1 x v5e" in why["v5e"]
    assert why["l4"].startswith("a request alone takes tpot")
    assert "l4 x 1: a request alone takes tpot" in capsys.readouterr().out


def test_larger_sizes_are_tried_until_the_model_fits(tmp_path: Path) -> None:
    limits = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
    rows = plan(tmp_path, LLAMA, "--hardware", "v5e", "--workload", "random:200/10", "--num-prompts", "20", *limits)
    assert rows[0]["tensor_parallel_size"] == 2
    assert all(row["tensor_parallel_size"] > 1 for row in rows)


def test_quantised_weights_take_less_memory_and_time(tmp_path: Path) -> None:
    words = ("--hardware", "h100", "-tp", "1", "--workload", "random:200/100", "--num-prompts", "16")
    words = (LLAMA, *words, "--max-num-seqs", "16", "--max-num-batched-tokens", "1024")
    (dense,), (fp8,) = (
        plan(tmp_path, *words),
        plan(tmp_path, *words, "--quantization", "fp8", "--kv-cache-dtype", "fp8"),
    )
    assert fp8["weight_bytes"] < 0.6 * dense["weight_bytes"]
    assert fp8["kv_cache_tokens"] > 2 * dense["kv_cache_tokens"]
    assert fp8["replica"]["seconds"] < 0.65 * dense["replica"]["seconds"]


def test_a_shared_prefix_serves_more(tmp_path: Path) -> None:
    words = (LLAMA, "--hardware", "h100", "-tp", "1", "--num-prompts", "100")
    words = (*words, "--max-num-seqs", "64", "--max-num-batched-tokens", "1024", "--workload")
    (own,) = plan(tmp_path, *words, "random:1100/10")
    (shared,) = plan(tmp_path, *words, "random:100/10,prefix=1000")
    assert shared["replica"]["requests_per_second"] > 4 * own["replica"]["requests_per_second"]


def test_a_scheduler_that_is_slower_than_the_replicas_of_a_cluster_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [LLAMA, "--hardware", "h100", "-tp", "1", "--workload", "random:400/60", "--num-prompts", "300"]
    words += ["--max-num-seqs", "64", "--max-num-batched-tokens", "1024", "--slo", "ttft=300ms,tpot=30ms"]
    words += ["--request-rate", "150"]
    (row,) = plan(tmp_path, *words)
    run = Planning._run

    def half(self: Planning, config: Any, own: Any) -> tuple[float, Any]:
        rate, measures = run(self, config, own)
        return rate / 2, measures

    monkeypatch.setattr(Planning, "_run", half)
    (slower,) = plan(tmp_path, *words)
    assert slower["requests_per_second_per_replica"] == row["requests_per_second_per_replica"] / 2
    for each in (row, slower):
        assert each["replicas"] >= 150 / each["requests_per_second_per_replica"]
    assert 2 * row["replicas"] - 1 <= slower["replicas"] <= 2 * row["replicas"] + 1


def test_replicas_share_chips_with_several_devices() -> None:
    row = Row("v7x", 1, devices_per_chip=2, replicas=5)
    assert row.chips == 3
    assert replace(row, tensor_parallel=4, replicas=None).chips == 2


def test_drafts_that_are_accepted_serve_more(tmp_path: Path) -> None:
    words = (LLAMA, "--hardware", "h100", "-tp", "1", "--workload", "random:100/60", "--num-prompts", "40")
    words = (*words, "--max-num-seqs", "16", "--max-num-batched-tokens", "1024", "--slo", "tpot=12ms")
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--acceptance-rate")
    (plain,) = plan(tmp_path, *words)
    (drafted,) = plan(tmp_path, *words, *drafts, "0.8")
    assert drafted["requests_per_second_per_replica"] > 1.4 * plain["requests_per_second_per_replica"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "h900"), "--hardware: h900 is unknown; use one of a100"),
        (("--slo", "ttft=fast"), "--slo: 'ttft=fast' is not a latency"),
        (("--slo", "p99=3s"), "--slo: 'p99=3s' is not a latency; use ttft, tpot, e2el"),
        (("--workload", "random:12"), "--workload: 'random:12' is unknown; use random:INPUT/OUTPUT"),
        (("--workload", "random:12/5,seed=3"), "--workload: 'seed=3' is none of range, prefix, prefixes"),
        (("--workload", "trace:none.jsonl"), "none.jsonl: No such file"),
        (("--price", "none.json"), "--price: none.json: No such file"),
        (("--request-rate", "0"), "--request-rate: 0.0 is not positive"),
        (("--slo-percentile", "0"), "--slo-percentile: 0.0 is not in (0, 100]"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'), "--acceptance-rate: required"),
        (("--backend", "reference"), "--backend: reference is a real one; drop it"),
    ],
)
def test_errors_name_the_flag(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, "--hardware", "h100", *words]) == 2
    assert message in capsys.readouterr().err


# Workloads.


def test_random_lengths() -> None:
    load = parse_workload("random:100/10", 50, 0, timed=False)
    assert set(load.prompts) == {100}
    assert set(load.outputs) == {10}
    assert not load.arrivals
    spread = parse_workload("random:100/10,range=0.5,prefix=30,prefixes=3", 500, 0, timed=True)
    assert (min(spread.prompts), max(spread.prompts)) == (80, 180)
    assert set(spread.prefixes) == {0, 1, 2}
    assert set(spread.prefix_lens) == {30}
    assert np.diff(spread.arrivals).mean() == pytest.approx(1.0, rel=0.1)
    assert spread.arrive(20.0)[-1] == pytest.approx(spread.arrivals[-1] / 20)


def test_chat_lengths() -> None:
    load = parse_workload("sharegpt", 4000, 0, timed=False)
    assert np.mean(load.prompts) == pytest.approx(180, rel=0.1)
    assert np.mean(load.outputs) == pytest.approx(190, rel=0.1)
    assert max(load.prompts) == 1024


def test_a_trace_keeps_its_arrivals_and_shared_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": 1.0, "input_length": 700, "output_length": 5, "hash_ids": [7]},
        {"arrival": 2.0, "input_length": 600, "output_length": 6, "hash_ids": [7]},
        {"arrival": 5.0, "input_length": 90, "output_length": 7},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    load = parse_workload(f"trace:{trace}", 10, 0, timed=True)
    assert load.prompts == (700, 600, 90)
    assert load.outputs == (5, 6, 7)
    assert load.arrivals == (0.0, 0.5, 2.0)
    assert load.prefixes == (0, 0, -1)
    assert load.prefix_lens == (512, 512, 0)
    assert load.longest == 705


def test_targets() -> None:
    assert parse_target("ttft=500ms, tpot=0.04s") == (("ttft", 0.5), ("tpot", 0.04))
    assert parse_target(None) == ()
    with pytest.raises(ConfigError):
        parse_target("ttft=0ms")


def test_a_load_that_queues_up_does_not_meet_a_target_of_tokens() -> None:
    load = PlannedLoad((10,) * 100, (2,) * 100, tuple(map(float, range(100))))
    target = ServiceTarget((("tpot", 1.0),))
    arrived = load.arrive(10.0)
    in_time = target.measure(load, arrived, arrived + 0.1, arrived + 0.2)
    assert target.is_met(in_time)
    assert in_time.mean == pytest.approx({"ttft": 0.1, "tpot": 0.1, "e2el": 0.2})
    late = arrived * 2 + 0.1
    assert not target.is_met(target.measure(load, arrived, late, late + 0.1))
