"""The benchmark commands: settings reach the requests, results follow from the outcomes, errors are one line."""

import asyncio
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.byte_text import byte_tokenizer
from support.fake_engine import build as build_fake
from support.live_server import LiveServer, live_server

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.bench import ServeLoadConfig, StartupConfig
from pagoda.common.config.settings import build
from pagoda.common.errors import ConfigError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.cli import main
from pagoda.server.cli.bench import latency as bench_latency
from pagoda.server.cli.bench import serve as bench_serve
from pagoda.server.cli.bench import startup as bench_startup
from pagoda.server.cli.bench import throughput as bench_throughput
from pagoda.server.cli.bench.client import Endpoint, Outcome
from pagoda.server.cli.bench.serve import SETTINGS, figures, plan_requests, report
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs, FlagParser, resolve_flags

TESTS = Path(__file__).resolve().parents[2]
TEXT = byte_tokenizer()


def open_text(config: EngineConfig) -> Tokenizer | None:
    return None if config.model.skip_tokenizer_init else TEXT


class RecordingLLM(LLM):
    """Records each call of generate."""

    calls: tuple[Any, ...] = ()

    def generate(self, prompts: Any, sampling_params: Any = None, **more: Any) -> Any:
        self.calls = (*self.calls, (prompts, sampling_params))
        return super().generate(prompts, sampling_params, **more)


def bench(command: str, monkeypatch: pytest.MonkeyPatch, *words: str, status: int = 0) -> Sequence[Any]:
    """Runs an offline benchmark over the fake engine; the calls of generate."""
    module = {"latency": bench_latency, "throughput": bench_throughput}[command]
    llms = []

    def start(engine_args: EngineArgs) -> LLM:
        engine = LLMEngine(engine_args.create_engine_config(), build=build_fake, open_text=open_text)
        llms.append(RecordingLLM.from_engine(engine))
        return llms[0]

    monkeypatch.setattr(module, "start_llm", start)
    assert main.main(["bench", command, "--model", "fake", *words]) == status
    return llms[0].calls


@pytest.mark.command("bench latency")
@pytest.mark.setting("--batch-size", "--input-len", "--output-len", "--n", "--num-iters", "--num-iters-warmup")
@pytest.mark.setting("--disable-detokenize", "--output-json")
def test_latency(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    words = ["--input-len", "4", "--output-len", "2", "--batch-size", "3", "--n", "2"]
    words += ["--num-iters", "3", "--num-iters-warmup", "2", "--output-json"]
    calls = bench("latency", monkeypatch, *words, str(file))
    assert len(calls) == 2 + 3
    for prompts, params in calls:
        assert [len(each["prompt_token_ids"]) for each in prompts] == [4, 4, 4]
        assert (params.max_tokens, params.n, params.detokenize, params.ignore_eos) == (2, 2, True, True)
    text = capsys.readouterr().out
    assert "Avg latency: " in text
    assert "99% percentile latency: " in text
    results = json.loads(file.read_text())
    assert len(results["latencies"]) == 3
    assert results["avg_latency"] == pytest.approx(sum(results["latencies"]) / 3)
    calls = bench("latency", monkeypatch, *words[:-1], "--disable-detokenize")
    assert not calls[0][1].detokenize


@pytest.mark.setting("--profile")
def test_latency_writes_a_trace_of_one_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--input-len", "4", "--output-len", "2", "--num-iters-warmup", "2", "--num-iters", "9", "--profile"]
    words += ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(tmp_path)]
    assert len(bench("latency", monkeypatch, *words)) == 2 + 1
    text = capsys.readouterr().out
    assert re.search(r"^Trace of one batch: pagoda_\S+$", text, re.MULTILINE)
    assert "latency" not in text


@pytest.mark.command("bench throughput")
@pytest.mark.setting("--num-prompts", "--input-len", "--output-len", "--n", "--disable-detokenize", "--output-json")
def test_throughput(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    words = ["--input-len", "8", "--output-len", "4", "--num-prompts", "5", "--n", "2"]
    words += ["--skip-tokenizer-init", "--disable-detokenize", "--output-json"]
    ((prompts, params),) = bench("throughput", monkeypatch, *words, str(file))
    assert len(prompts) == 5
    assert not params.detokenize
    text = capsys.readouterr().out
    assert re.search(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s", text)
    assert "Total num prompt tokens:  40" in text
    assert "Total num output tokens:  40" in text
    assert json.loads(file.read_text())["num_requests"] == 5


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *(("latency", [flag, "0"]) for flag in ("--input-len", "--output-len", "--batch-size", "--n", "--num-iters")),
        ("latency", ["--num-iters-warmup", "-1"]),
        ("latency", ["--use-beam-search"]),
        ("latency", ["--profile"]),
        *(("throughput", [flag, "0"]) for flag in ("--input-len", "--output-len", "--num-prompts", "--n")),
        *(("startup", [flag, "0"]) for flag in ("--input-len", "--num-iters")),
        ("startup", ["--num-iters-warmup", "-1"]),
    ],
)
def test_offline_errors_are_one_line(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", command, "--model", "fake", *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"pagoda: error: {words[0]}: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_request_above_the_context(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(command, monkeypatch, "--input-len", "60", "--output-len", "5", status=2) == ()
    assert "--output-len: 60 + 5 tokens exceed the context of 64" in capsys.readouterr().err


def test_startup_settings_reach_the_server() -> None:
    words = ["--model", "m", "--max-model-len", "2k", "--hf-overrides.a", "1", "--no-enable-prefix-caching"]
    parser = FlagParser(prog="bench")
    bench_startup.add_arguments(parser)
    _, settings = bench_startup.resolve_load(parser.parse_args(words), bench_startup.COMMAND, StartupConfig)
    passed = json.loads(json.dumps(bench_startup.engine_settings(settings)))
    assert passed == {"model": "m", "max-model-len": 2000, "hf-overrides": {"a": 1}, "enable-prefix-caching": False}


@pytest.mark.setting("--num-iters", "--num-iters-warmup", "--input-len", "--output-json")
def test_startup_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    seconds = iter([100.0, 100.0, 1.0, 2.0, 6.0])

    def start(settings: Path, input_len: int) -> float:
        started.append((json.loads(settings.read_text()), input_len))
        return next(seconds)

    monkeypatch.setattr(bench_startup, "time_start", start)
    file = tmp_path / "r.json"
    words = ["--num-iters", "3", "--num-iters-warmup", "2", "--input-len", "5", "--output-json", str(file)]
    assert main.main(["bench", "startup", "--model", "m", *words]) == 0
    assert started == [({"model": "m"}, 5)] * 5
    assert json.loads(file.read_text()) == {"avg_startup": 3.0, "median_startup": 2.0, "startups": [1.0, 2.0, 6.0]}
    assert "Median time to first token: 2.000 seconds" in capsys.readouterr().out


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_startup, "SERVE", (sys.executable, str(TESTS / "support" / "fake_serve.py")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *(path for path in sys.path if path)]))


@pytest.mark.command("bench startup")
@pytest.mark.usefixtures("fake_serve")
def test_startup_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "startup", "--model", "fake", "--num-iters", "1", "--num-iters-warmup", "0"]) == 0
    assert "of 1 starts" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_serve")
def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "startup", "--model", "fake:config", "--num-iters-warmup", "0"]) == 1
    assert "pagoda: error: the server did not start: --dtype: not today; use another" in capsys.readouterr().err


# --- bench serve: what is asked ---


def load(*words: str) -> ServeLoadConfig:
    parser = FlagParser(prog="bench")
    bench_serve.add_arguments(parser)
    return build(ServeLoadConfig, resolve_flags(parser.parse_args(words), SETTINGS), SETTINGS.values())


def planned(*words: str) -> list[Any]:
    return plan_requests(load(*words), "m", TEXT)


def prompts(*words: str) -> list[list[int]]:
    return [request.body["prompt"] for request in planned("--num-prompts", "20", *words)]


@pytest.mark.setting("--num-prompts", "--random-input-len", "--random-output-len", "--random-prefix-len", "--seed")
def test_prompts_follow_the_settings() -> None:
    results = prompts("--random-input-len", "7", "--random-prefix-len", "5", "--random-output-len", "3")
    assert [len(each) for each in results] == [12] * 20
    assert len({tuple(each[:5]) for each in results}) == 1
    assert len({tuple(each[5:]) for each in results}) == 20
    assert all(token != 256 for each in results for token in each)
    (request,) = planned("--num-prompts", "1", "--random-output-len", "3")
    assert (request.body["max_tokens"], request.prompt_tokens, request.at) == (3, 1024, 0.0)
    assert prompts("--seed", "1") == prompts("--seed", "1") != prompts("--seed", "2")


@pytest.mark.setting("--random-range-ratio")
def test_lengths_vary_within_their_range() -> None:
    lengths = {len(each) for each in prompts("--random-input-len", "10", "--random-range-ratio", "0.5")}
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(lengths) > 3


@pytest.mark.setting("--request-rate", "--burstiness")
def test_requests_arrive_at_their_rate() -> None:
    def gaps(*words: str) -> list[float]:
        at = [request.at for request in planned("--num-prompts", "400", "--random-input-len", "1", *words)]
        return [after - before for before, after in itertools.pairwise(at)]

    assert set(gaps()) == {0.0}
    poisson, steady = gaps("--request-rate", "50"), gaps("--request-rate", "50", "--burstiness", "100")
    assert sum(poisson) == pytest.approx(400 / 50, rel=0.2)
    assert sum(steady) == pytest.approx(400 / 50, rel=0.1)
    assert max(steady) < 2 / 50 < max(poisson)


@pytest.mark.setting("--temperature", "--ignore-eos")
def test_request_bodies() -> None:
    (plain,) = planned("--num-prompts", "1")
    assert (plain.body["model"], plain.body["temperature"], plain.body["stream"]) == ("m", 0.0, True)
    assert "ignore_eos" not in plain.body
    (other,) = planned("--num-prompts", "1", "--ignore-eos", "--temperature", "0.5")
    assert (other.body["ignore_eos"], other.body["temperature"]) == (True, 0.5)


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:8000/v1/completions"),
        (["--host", "::1", "--port", "7"], "http://[::1]:7/v1/completions"),
        (["--base-url", "https://h/x/", "--endpoint", "/y"], "https://h/x/y"),
        (["--backend", "openai-chat"], "http://127.0.0.1:8000/v1/chat/completions"),
        (["--backend", "vllm"], "http://127.0.0.1:8000/v1/completions"),
    ],
)
@pytest.mark.setting("--host", "--port", "--base-url", "--endpoint", "--backend")
def test_request_urls(words: list[str], url: str) -> None:
    config = load(*words)
    assert config.address + config.path == url


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--random-prefix-len", "-1"], "--random-prefix-len"),
        (["--num-warmups", "-1"], "--num-warmups"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--request-rate", "0"], "--request-rate"),
        (["--burstiness", "inf"], "--burstiness"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--metric-percentiles", "x"], "--metric-percentiles"),
        (["--result-dir", "x"], "--save-result"),
        (["--save-result", "--metadata", "x"], "--metadata"),
        (["--base-url", "h:1"], "--base-url"),
        (["--dataset-name", "sharegpt"], "--dataset-name"),
        (["--backend", "tgi"], "--backend"),
    ],
)
def test_invalid_settings(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*words)
    assert error.value.setting == flag


# --- bench serve: how it runs ---


class Measured:
    """Stands in for the requests: counts them, and how many there were at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: list[Any] = []
        self.urls: set[str] = set()
        self.keys: set[str | None] = set()
        self.running = self.most = 0
        monkeypatch.setattr(Endpoint, "measure", lambda *words: self.measure(*words))
        monkeypatch.setattr(bench_serve, "open_tokenizer", self.open)
        self.opened: list[str] = []

    def open(self, config: Any) -> Any:
        self.opened.append(config.model.model)
        return TEXT

    async def measure(self, endpoint: Endpoint, body: Any, prompt_tokens: int) -> Outcome:
        self.bodies.append(body)
        self.urls.add(endpoint.url)
        self.keys.add(endpoint.headers.get("authorization"))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Outcome(start=1.0, end=2.0, ttft=0.25, gaps=[0.25, 0.5], prompt_tokens=4, output_tokens=3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def serve_bench(*words: str) -> int:
    return main.main(["bench", "serve", "--num-prompts", "6", "--random-input-len", "4", "--disable-tqdm", *words])


@pytest.mark.setting("--max-concurrency", "--num-warmups", "--num-prompts")
def test_max_concurrency(measured: Measured) -> None:
    assert serve_bench("--model", "m", "--num-warmups", "0") == 0
    assert (measured.most, len(measured.bodies)) == (6, 6)
    measured.most = 0
    assert serve_bench("--model", "m", "--num-warmups", "3", "--max-concurrency", "2") == 0
    assert (measured.most, len(measured.bodies)) == (2, 6 + 3 + 6)


@pytest.mark.setting("--model", "--served-model-name", "--tokenizer")
@pytest.mark.variable("OPENAI_API_KEY")
def test_model_and_tokenizer(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert serve_bench("--model", "m") == 0
    assert measured.opened == ["m"]
    assert {body["model"] for body in measured.bodies} == {"m"}
    measured.bodies.clear()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert serve_bench("--model", "m", "--tokenizer", "t", "--served-model-name", "s") == 0
    assert measured.opened == ["m", "t"]
    assert {body["model"] for body in measured.bodies} == {"s"}
    assert measured.keys == {None, "Bearer k"}


@pytest.mark.setting("--disable-tqdm")
def test_disable_tqdm(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--num-prompts", "3", "--random-input-len", "4", "--model", "m"]
    assert main.main(words) == 0
    assert "3/3" in capsys.readouterr().err
    assert main.main([*words, "--disable-tqdm"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.setting("--save-result", "--save-detailed", "--result-dir", "--result-filename", "--metadata")
def test_results_are_saved(measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve_bench("--model", "a/m") == 0
    assert not list(tmp_path.iterdir())
    assert serve_bench("--model", "a/m", "--save-result", "--max-concurrency", "2") == 0
    (usual,) = tmp_path.iterdir()
    assert re.fullmatch(r"openai-infqps-concurrency2-m-\d{8}-\d{6}\.json", usual.name)
    more = ["--save-detailed", "--result-dir", "x/y", "--result-filename", "z.json", "--metadata", "chip=c", "run=1"]
    assert serve_bench("--model", "a/m", "--save-result", *more) == 0
    plain, results = json.loads(usual.read_text()), json.loads((tmp_path / "x" / "y" / "z.json").read_text())
    assert (results["chip"], results["run"], results["request_rate"]) == ("c", "1", "inf")
    assert (results["completed"], results["total_output_tokens"], results["itls"]) == (6, 18, [[0.25, 0.5]] * 6)
    assert "itls" not in plain


@pytest.mark.setting("--percentile-metrics", "--metric-percentiles")
def test_percentile_metrics(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_bench("--model", "m") == 0
    text = capsys.readouterr().out
    assert "P99 TTFT (ms):" in text
    assert "E2EL" not in text
    assert serve_bench("--model", "m", "--percentile-metrics", "e2el", "--metric-percentiles", "25,99.9") == 0
    text = capsys.readouterr().out
    assert "TTFT" not in text
    for row in ("Mean E2EL (ms):", "P25 E2EL (ms):", "P99.9 E2EL (ms):"):
        assert f"{row:<40}1000.00" in text


# --- bench serve: figures and requests ---


def test_figures_follow_from_outcomes() -> None:
    config = ServeLoadConfig(percentile_metrics=("ttft", "tpot", "itl", "e2el"), metric_percentiles=(50.0,))
    outcomes = [
        Outcome(start=10.0, end=14.0, ttft=1.0, gaps=[1.0, 2.0], prompt_tokens=5, output_tokens=4),
        Outcome(start=11.0, end=13.0, ttft=2.0, prompt_tokens=7, output_tokens=1),
        Outcome(start=11.0, prompt_tokens=100, error="no"),
    ]
    results = figures(config, outcomes, 4.0)
    assert (results["completed"], results["failed"]) == (2, 1)
    assert (results["total_input_tokens"], results["total_output_tokens"]) == (12, 5)
    assert (results["request_throughput"], results["output_throughput"]) == (0.5, 1.25)
    assert results["total_token_throughput"] == 4.25
    assert (results["mean_ttft_ms"], results["mean_tpot_ms"]) == (1500.0, 1000.0)
    assert (results["mean_itl_ms"], results["p50_e2el_ms"]) == (1500.0, 3000.0)
    assert results["std_ttft_ms"] == 500.0
    assert "Failed requests:                        1" in report(config, results)
    nothing = figures(config, outcomes[2:], 1.0)
    assert not any(math.isnan(value) for value in nothing.values())


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_key=("k",)) as server:
        yield server


@pytest.mark.command("bench serve")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_under_load(
    server: LiveServer, backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    opened = []
    monkeypatch.setattr(bench_serve, "open_tokenizer", lambda config: opened.append(config.model.model) or TEXT)
    words = ["--port", str(server.port), "--backend", backend, "--random-output-len", "5", "--ignore-eos"]
    assert serve_bench(*words) == 0
    assert opened == ["fake"]  # what the server says is behind its name
    text = capsys.readouterr().out
    assert f"{'Successful requests:':<40}6" in text
    assert f"{'Total generated tokens:':<40}30" in text
    if backend == "openai":
        assert f"{'Total input tokens:':<40}24" in text


def test_a_request_is_timed_from_its_start_to_its_last_token(server: LiveServer) -> None:
    async def request(path: str, **body: Any) -> Outcome:
        endpoint = Endpoint(server.url + path, {"authorization": "Bearer k"})
        return await endpoint.measure({"stream": True, **body}, 9)

    outcome = asyncio.run(request("/v1/completions", prompt="a", max_tokens=4))
    assert not outcome.error
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 1 + len(outcome.gaps))  # tokens may come together
    assert outcome.ttft + sum(outcome.gaps) == pytest.approx(outcome.latency)
    counted = asyncio.run(request("/v1/completions", prompt="a", max_tokens=4, stream_options={"include_usage": True}))
    assert (counted.prompt_tokens, counted.output_tokens) == (1, 4)
    assert "404" in asyncio.run(request("/v1/nothing")).error
    assert "max_tokens" in asyncio.run(request("/v1/completions", prompt="a", max_tokens="x")).error
    assert "ended early" in asyncio.run(request("/v1/completions", prompt="a", max_tokens=1, stream=False)).error


def test_a_server_that_dies_under_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "open_tokenizer", lambda config: TEXT)
    with live_server("fake:crash") as server:
        words = ["--base-url", server.url, "--num-warmups", "0", "--random-output-len", "9", "--ignore-eos"]
        assert serve_bench(*words) == 1
    printed = capsys.readouterr()
    assert f"{'Failed requests:':<40}6" in printed.out
    assert "pagoda: error: 6 of 6 requests failed, the first with: " in printed.err


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "open_tokenizer", lambda config: TEXT)
    for words in ([], ["--model", "m"]):
        assert serve_bench("--port", "1", *words) == 1
        text = capsys.readouterr().err
        assert "is the server running?" in text
        assert text.count("\n") == 1


def test_a_missing_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_bench("--model", "/no/such/folder") == 2
    assert "--tokenizer: /no/such/folder: " in capsys.readouterr().err
