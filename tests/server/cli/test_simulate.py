"""pagoda calibrate, pagoda simulate and --backend simulated: from a measured step time to the table of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.tiny_folder import write_model
from support.engines.simulated_device import calibration_of, write_calibration

from pagoda.backends.registry import choose_backend
from pagoda.backends.simulated.calibration import read_calibration
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.cli import main
from pagoda.server.cli.capacity.trace_file import read_trace
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve
from pagoda.server.startup.engine import backend_options

ONE_AT_A_TIME = ("--no-async-scheduling", "--max-concurrency", "1", "--num-prompts", "3", "--no-enable-prefix-caching")
LENGTHS = ("--random-input-len", "40", "--random-output-len", "5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    folder = write_model(tmp_path_factory.mktemp("simulate") / "tiny")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps take 10 ms, with chunks 20 ms, and 1 ms per token."""
    args = EngineArgs(model, backend="reference", load_format="dummy")
    options = backend_options(resolve(args.create_engine_config(), "server"), SamplerOptions())
    return write_calibration(tmp_path_factory.mktemp("times") / "c.json", calibration_of(options))


@pytest.fixture
def simulate(model: Path, calibration: Path, tmp_path: Path) -> Any:
    def run(*words: str, status: int = 0) -> dict[str, Any]:
        output = tmp_path / "results.json"
        command = ["simulate", str(model), "--calibration", str(calibration), "--output-json", str(output), *words]
        assert main.main(command) == status
        return json.loads(output.read_text()) if output.exists() else {}

    return run


def refusal(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    assert main.main(list(words)) == main.USAGE_ERROR
    return capsys.readouterr().err.strip()


@pytest.mark.command("simulate")
@pytest.mark.setting("--calibration", "--output-json", "--max-concurrency")
def test_times_are_those_of_the_steps(simulate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of 40 tokens takes 60 ms, each of the 4 further tokens 11 ms."""
    results = simulate(*ONE_AT_A_TIME, *LENGTHS)
    assert results["mean_ttft_ms"] == pytest.approx(60)
    assert results["mean_tpot_ms"] == pytest.approx(11)
    assert results["duration"] == pytest.approx(3 * 0.104)
    assert (results["completed"], results["total_output_tokens"], results["steps"]) == (3, 15, 15)
    text = capsys.readouterr().out
    assert "Serving Benchmark Result" in text
    assert "Mean TTFT (ms):                         60.00" in text
    assert "Steps:                                  15" in text


@pytest.mark.setting("--request-rate", "--burstiness")
def test_a_day_of_traffic_takes_seconds(simulate: Any) -> None:
    results = simulate("--num-prompts", "200", *LENGTHS, "--request-rate", "0.01", "--burstiness", "4")
    assert 200 / 0.01 * 0.7 < results["duration"] < 200 / 0.01 * 1.4
    assert results["mean_ttft_ms"] == pytest.approx(60, rel=0.05)


@pytest.mark.setting("--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching", "--random-prefix-len")
def test_settings_of_the_engine_hold(simulate: Any) -> None:
    words = ("--num-prompts", "12", "--random-input-len", "8", "--random-output-len", "8", "--random-prefix-len", "64")
    cached = simulate(*words, "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--block-size", "16")
    assert cached["prefix_cache_hit_rate"] > 0.5
    assert (cached["max_num_seqs"], cached["max_num_batched_tokens"], cached["block_size"]) == (2, 32, 16)
    plain = simulate(*words, "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--no-enable-prefix-caching")
    assert plain["prefix_cache_hit_rate"] == 0.0
    assert plain["duration"] > 1.5 * cached["duration"]
    assert simulate(*words, "--max-num-seqs", "12")["duration"] < cached["duration"]


@pytest.mark.setting("--num-gpu-blocks-override")
def test_scarce_blocks_cause_preemptions(simulate: Any) -> None:
    words = ("--num-prompts", "8", "--random-input-len", "8", "--random-output-len", "60", "--block-size", "4")
    assert simulate(*words, "--num-gpu-blocks-override", "60")["preemptions"] > 0
    assert simulate(*words, "--num-gpu-blocks-override", "600")["preemptions"] == 0


@pytest.mark.setting("--acceptance-rate", "--speculative-config")
def test_drafts_at_an_assumed_rate(simulate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-prompts", "8", "--random-input-len", "8", "--random-output-len", "100", "--max-concurrency", "1")
    plain = simulate(*words)
    drafts = simulate(
        *words, "--spec-method", "ngram", "--spec-tokens", "3", "--acceptance-rate", "0.8", "--no-async-scheduling"
    )
    assert drafts["spec_decode_acceptance_length"] == pytest.approx(2.95, rel=0.1)
    assert drafts["steps"] < 0.5 * plain["steps"]
    assert "Acceptance length:" in capsys.readouterr().out


def test_a_config_json_is_enough(model: Path, calibration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(model / "config.json"), "--calibration", str(calibration), "--num-prompts", "2", *LENGTHS]
    assert main.main(words) == 0
    assert "Successful requests:                    2" in capsys.readouterr().out


@pytest.mark.setting("--trace")
def test_requests_of_a_trace(simulate: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": 5000, "input_length": 40, "output_length": 3},
        {"arrival": 1.0, "prompt_token_ids": [1, 2, 3], "output_token_ids": [9, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    results = simulate("--trace", str(path), "--no-async-scheduling")
    assert (results["total_input_tokens"], results["total_output_tokens"]) == (43, 5)
    assert results["duration"] == pytest.approx(4.0 + 0.060 + 2 * 0.011)
    requests = read_trace(path, tokens=range(97), seed=0)  # type: ignore[arg-type]
    assert [each.at for each in requests] == [1.0, 5.0]
    assert requests[0].request.prompt_token_ids == [1, 2, 3]
    assert requests[0].request.rules.extra_args == {"output_token_ids": [9, 9]}


def test_hash_ids_of_a_trace_are_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids = ([5, 6], [5, 7], [])
    lines = [
        {"arrival": at, "input_length": 25, "output_length": 1, "hash_ids": own, "hash_block_size": 10}
        for at, own in enumerate(ids)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    one, two, three = (each.request.prompt_token_ids for each in read_trace(path, np.arange(50, 10_000), seed=3))
    assert len(one) == len(two) == len(three) == 25
    assert one[:10] == two[:10]
    assert one[10:20] != two[10:20]
    assert one[20:] != two[20:]
    assert one[:10] != three[:10]
    assert min(one + two + three) >= 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: .*truncated"),
        (
            '{"arrival": 1, "timestamp": 2, "input_length": 3, "output_length": 1}',
            "give arrival, in seconds, or timestamp",
        ),
        ('{"arrival": 1, "output_length": 1}', "give prompt_token_ids or input_length"),
        ('{"arrival": 1, "input_length": 3}', "give output_token_ids or output_length"),
        ('{"arrival": 1, "input_length": 0, "output_length": 1}', "lengths must be 1 or more"),
        ('{"arrival": -1, "input_length": 3, "output_length": 1}', "the arrival must be 0 or later"),
        ('{"arrival": 1, "prompt_token_ids": [1], "output_length": 1, "hash_ids": [1]}', "hash_ids describe made-up"),
        ('{"arrival": 1, "input_length": 3, "output_length": 1, "color": 2}', "color"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "input_length": 3, "output_length": 1}\n' + line)
    with pytest.raises(ConfigError, match=rf"(?s)^--trace: .*line 2: .*{message.removeprefix('line 2: .*')}"):
        read_trace(path, range(9), 0)  # type: ignore[arg-type]


def test_what_contradicts_itself_is_refused(
    model: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(model), "--calibration", str(calibration)]
    (tmp_path / "t.jsonl").write_text("")
    trace = ["--trace", str(tmp_path / "t.jsonl")]
    assert "--trace" in refusal(capsys, [*words, *trace])
    assert "--request-rate: requests and arrivals are those of --trace" in refusal(
        capsys, [*words, *trace, "--request-rate", "3"]
    )
    assert "--random-input-len: requests and" in refusal(capsys, [*words, *trace, "--random-input-len", "3"])
    assert "--backend: reference is a real one" in refusal(capsys, [*words, "--backend", "reference"])
    assert "--simulated-time: the clock" in refusal(capsys, [*words, "--simulated-time", "none"])
    assert "--dataset-name: multi_turn needs" in refusal(capsys, [*words, "--dataset-name", "multi_turn"])
    assert "--hardware: required" in refusal(capsys, ["simulate", str(model)])
    assert "--dtype: float32, but --calibration" in refusal(capsys, [*words, "--dtype", "float32"])


def test_requests_that_cannot_run_fail_and_the_others_are_reported(
    simulate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"arrival": 0, "input_length": length, "output_length": 2} for length in (500, 3)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    results = simulate("--trace", str(tmp_path / "t.jsonl"), status=1)
    assert (results["failed"], results["completed"]) == (1, 1)
    assert "1 of 2 requests failed, the first with: " in capsys.readouterr().err
    assert simulate("--num-prompts", "2", "--random-input-len", "500", status=1) == results, "no results of none"
    assert "2 of 2 requests failed" in capsys.readouterr().err


# --- the backend behind the Python API and a server ---


class WaitedClock:
    """Moves as far as it is waited for."""

    now = 0.0

    def wait_until(self, end: float) -> None:
        self.now = max(self.now, end)


@pytest.mark.setting("--simulated-time")
def test_an_engine_on_the_simulated_backend_answers(
    model: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"backend": "simulated", "calibration": calibration, "max_model_len": 128, "disable_log_stats": True}
    params = SamplingParams(max_tokens=20, temperature=0)
    answers, seconds = {}, {}
    for simulated_time in ("none", "real"):
        clock = WaitedClock()
        monkeypatch.setattr("pagoda.backends.simulated.backend.RealClock", lambda clock=clock: clock)
        llm = LLM(model, simulated_time=simulated_time, **settings)
        answers[simulated_time] = llm.generate(["Hello there"], params, use_tqdm=False)[0].outputs[0]
        seconds[simulated_time] = clock.now
        llm.shutdown()
    assert list(answers["none"].token_ids) == list(answers["real"].token_ids)
    assert (len(answers["none"].token_ids), answers["none"].finish_reason) == (20, "length")
    assert seconds["real"] >= 0.03 + 19 * 0.011
    assert seconds["none"] == 0


def test_the_simulated_backend_is_chosen_by_name_only(model: Path) -> None:
    with pytest.raises(ConfigError, match="--hardware: required with --backend simulated"):
        LLM(model, backend="simulated")
    assert choose_backend("auto") != "simulated"


# --- calibrate ---


@pytest.mark.command("calibrate")
@pytest.mark.setting("--output", "--repeats", "--max-seconds")
def test_a_calibration_is_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = write_model(tmp_path / "tiny"), tmp_path / "tiny.json"
    small = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "96", "--block-size", "8")
    words = ["calibrate", str(model), "--backend", "reference", *small, "-o", str(path)]
    assert main.main([*words, "--repeats", "1", "--max-seconds", "1"]) == 0
    text = capsys.readouterr().out
    assert "decode steps: mean error" in text
    assert f"--calibration {path}" in text
    calibration = read_calibration(path)
    assert (calibration.backend, calibration.platform.kind, calibration.prefers_extents) == ("reference", "cpu", True)
    assert main.main(["simulate", str(model), "--calibration", str(path), *small, "--num-prompts", "2", *LENGTHS]) == 0
    assert "Successful requests:                    2" in capsys.readouterr().out


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tiny")
    assert "--backend: simulated has no steps" in refusal(capsys, ["calibrate", str(model), "--backend", "simulated"])
    nowhere = ["calibrate", str(model), "-o", str(tmp_path / "no" / "c.json")]
    assert "--output: " in refusal(capsys, nowhere)
    assert "--repeats: 0 is not positive" in refusal(capsys, ["calibrate", str(model), "--repeats", "0"])
    assert "--max-seconds: 0.0 is not" in refusal(capsys, ["calibrate", str(model), "--max-seconds", "0"])
