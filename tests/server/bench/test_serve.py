"""`bench serve`: settings reach the requests, answers become timings, results become files."""

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.servers.fake_openai import FakeOpenAI
from support.servers.live_server import LiveServer, live_server
from support.suite.clock import Clock
from support.suite.watching import PATIENCE

from pagoda.common.errors import ConfigError
from pagoda.server.bench.online import serve as bench_serve
from pagoda.server.bench.online.apis import APIS, read_chat, read_completion
from pagoda.server.bench.online.client import Endpoint
from pagoda.server.bench.online.load import PlannedRequest
from pagoda.server.bench.online.metrics import Outcome
from pagoda.server.bench.online.serve import ServeBenchmark, benchmark_of, plan_requests
from pagoda.server.bench.report import plots
from pagoda.server.cli import main

TEXT = byte_tokenizer()


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with FakeOpenAI().running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose tokenizers were opened; all are TEXT."""
    names: list[str] = []
    monkeypatch.setattr(bench_serve, "open_tokenizer", lambda config: names.append(config.model.model) or TEXT)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return names


def load(*words: str) -> ServeBenchmark:
    parser = main.parser_of("bench serve", main.BENCH["serve"])
    return benchmark_of(parser.parse_args(words))


def planned(*words: str) -> list[PlannedRequest]:
    return plan_requests(load(*words), "m", TEXT)


def serve_bench(fake: FakeOpenAI | LiveServer, *words: str) -> int:
    """Six short requests, unless the words say otherwise; no warm-up."""
    usual = {"--num-prompts": "6", "--num-warmups": "0", "--random-input-len": "4", "--random-output-len": "3"}
    if "--dataset-name" in words:
        usual = {"--num-prompts": "6", "--num-warmups": "0"}
    given = [word for flag, value in usual.items() if flag not in words for word in (flag, value)]
    return main.main(["bench", "serve", "--port", str(fake.port), "--disable-tqdm", *given, *words])


# --- what is asked ---


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:8000/v1/completions"),
        (["--host", "::1", "--port", "7"], "http://[::1]:7/v1/completions"),
        (["--base-url", "https://h/x/", "--endpoint", "/y"], "https://h/x/y"),
        (["--backend", "openai-chat"], "http://127.0.0.1:8000/v1/chat/completions"),
        (["--backend", "openai-responses"], "http://127.0.0.1:8000/v1/responses"),
        (["--backend", "vllm"], "http://127.0.0.1:8000/v1/completions"),
        (["--backend", "openai-embeddings"], "http://127.0.0.1:8000/v1/embeddings"),
        (["--backend", "vllm-pooling"], "http://127.0.0.1:8000/pooling"),
    ],
)
@pytest.mark.setting("--host", "--port", "--base-url", "--endpoint", "--backend")
def test_request_urls(words: list[str], url: str) -> None:
    target = load(*words).target
    assert target.address + target.path == url


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--num-warmups", "-1"], "--num-warmups"),
        (["--probe-request-rate", "-1"], "--probe-request-rate"),
        (["--result-dir", "x"], "--save-result"),
        (["--save-detailed"], "--save-result"),
        (["--save-result", "--metadata", "x"], "--metadata"),
        (["--header", "x"], "--header"),
        (["--base-url", "h:1"], "--base-url"),
        (["--backend", "tgi"], "--backend"),
        (["--backend", "openai-audio"], "--backend"),
        (["--backend", "infinity-embeddings"], "--backend"),
        (["--backend", "vllm-rerank"], "--backend"),
        (["--dataset-name", "random-rerank"], "--backend"),
        (["--dataset-name", "multi_turn", "--backend", "openai-embeddings"], "--dataset-name"),
        (["--dataset-name", "timed_trace", "--dataset-path", "x", "--backend", "openai-chat"], "--backend"),
        (["--dataset-name", "timed_trace", "--dataset-path", "x", "--request-rate", "2"], "--request-rate"),
        (["--self-timed"], "--self-timed"),
        (["--random-batch-size", "2"], "--random-batch-size"),
        (["--backend", "openai-embeddings", "--temperature", "1"], "--temperature"),
        (["--backend", "openai-embeddings", "--goodput", "e2el:5"], "--goodput"),
        (["--backend", "openai-embeddings", "--percentile-metrics", "ttft"], "--percentile-metrics"),
        (["--percentile-metrics", "client_queue_time"], "--percentile-metrics"),
        (["--prompt-token-ids", "--backend", "openai-chat"], "--prompt-token-ids"),
        (["--prompt-token-ids", "--skip-tokenizer-init"], "--prompt-token-ids"),
        (["--timeline-itl-thresholds", "5"], "--timeline-itl-thresholds"),
        (["--lora-modules", "a", "a"], "--lora-modules"),
        (["--use-beam-search"], "--use-beam-search"),
        (["--tokenizer-mode", "slow"], "--tokenizer-mode"),
        (["--enable-multimodal-chat"], "--enable-multimodal-chat"),
        (["--hf-split", "train"], "--hf-split"),
        (["--random-mm-base-items-per-request", "2"], "--random-mm-base-items-per-request"),
        (["--no-stream"], "--no-stream"),
    ],
)
def test_settings_are_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*words)
    assert error.value.setting == flag


@pytest.mark.setting("--seed", "--prompt-token-ids", "--num-prompts")
def test_plans_follow_the_seed(fake: FakeOpenAI) -> None:
    words = ["--num-prompts", "20", "--request-rate", "3"]
    plans = [[(each.sample, each.arrival) for each in planned(*words, "--seed", seed)] for seed in ("1", "1", "2")]
    assert plans[0] == plans[1] != plans[2]
    assert serve_bench(fake, "--model", "m", "--prompt-token-ids") == 0
    assert {len(body["prompt"]) for body in fake.bodies} == {4}
    assert all(isinstance(token, int) for body in fake.bodies for token in body["prompt"])


@pytest.mark.setting("--ignore-eos", "--extra-body", "--logprobs", "--temperature", "--top-p", "--top-k", "--min-p")
@pytest.mark.setting("--frequency-penalty", "--presence-penalty", "--repetition-penalty")
def test_fields_of_the_body(fake: FakeOpenAI, tmp_path: Path) -> None:
    assert serve_bench(fake, "--model", "m", "--num-prompts", "1") == 0
    assert fake.bodies[0].keys() == {"model", "prompt", "max_tokens", "stream", "stream_options", "ignore_eos"}
    assert (fake.bodies[0]["model"], len(fake.bodies[0]["prompt"]), fake.bodies[0]["max_tokens"]) == ("m", 4, 3)
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    custom = ["--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "2"]
    assert serve_bench(fake, "--model", "m", "--num-prompts", "1", *custom) == 0
    assert "ignore_eos" not in fake.bodies[1]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}
    sampling |= {"frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    words = [word for name, value in sampling.items() for word in ("--" + name, str(value))]
    words += ["--ignore-eos", "--logprobs", "2", "--extra-body.top_k", "7", "--extra-body.guided", "x"]
    assert serve_bench(fake, "--model", "m", "--num-prompts", "1", *custom, *words) == 0
    assert fake.bodies[2].items() >= (sampling | {"top_k": 7, "ignore_eos": True, "logprobs": 2, "guided": "x"}).items()


@pytest.mark.parametrize(
    ("backend", "fields", "content"),
    [
        ("openai-chat", {"max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}, "messages"),
        ("openai-responses", {"max_output_tokens": 3, "top_logprobs": 2, "stream": True}, "input"),
    ],
)
def test_other_apis(fake: FakeOpenAI, backend: str, fields: dict[str, Any], content: str, tmp_path: Path) -> None:
    words = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert serve_bench(fake, "--model", "m", "--backend", backend, "--logprobs", "2", *words) == 0
    assert all(body.items() >= fields.items() and content in body for body in fake.bodies)
    results = json.loads((tmp_path / "r.json").read_text())
    assert (results["completed"], results["total_input_tokens"], results["total_output_tokens"]) == (6, 30, 18)
    assert {len(gaps) for gaps in results["itls"]} == {2}  # neither the role nor the finish reason is a token
    assert results["generated_texts"] == ["aaa"] * 6


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["--backend", "openai-embeddings", "--random-batch-size", "2"], {"encoding_format": "float"}),
        (["--backend", "vllm-pooling"], {}),
        (["--backend", "openai-embeddings-chat"], {}),
        (["--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--random-batch-size", "3"], {}),
    ],
)
def test_pooling_apis(fake: FakeOpenAI, words: list[str], body: dict[str, Any], capsys: Any) -> None:
    assert serve_bench(fake, "--model", "m", "--input-len", "4", *words) == 0
    assert all(each.items() >= ({"model": "m"} | body).items() and "stream" not in each for each in fake.bodies)
    text = capsys.readouterr().out
    assert f"{'Total input tokens:':<40}42" in text
    assert "Mean E2EL" in text
    assert "TTFT" not in text
    if "vllm-rerank" in words:
        assert {len(each["documents"]) for each in fake.bodies} == {3}
    if "--random-batch-size" in words and "openai-embeddings" in words:
        assert {len(each["input"]) for each in fake.bodies} == {2}


@pytest.mark.setting("--model", "--served-model-name", "--tokenizer", "--skip-tokenizer-init", "--header")
@pytest.mark.variable("OPENAI_API_KEY")
def test_model_tokenizer_and_headers(
    fake: FakeOpenAI, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert serve_bench(fake) == 0
    assert (opened, fake.bodies[-1]["model"]) == (["root"], "served")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert serve_bench(fake, "--model", "m", "--tokenizer", "t", "--served-model-name", "s", "--header", "x-a=b") == 0
    assert (opened, fake.bodies[-1]["model"]) == (["root", "t"], "s")
    assert (fake.headers[0].get("authorization"), fake.headers[-1]["authorization"]) == (None, "Bearer k")
    assert fake.headers[-1]["x-a"] == "b"
    assert serve_bench(fake, "--model", "m", "--header", "Authorization=Basic z") == 0
    assert fake.headers[-1]["authorization"] == "Basic z"
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    custom = ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-tokenizer-init"]
    assert serve_bench(fake, "--model", "m", *custom) == 0
    assert opened == ["root", "t", "m"]
    assert fake.bodies[-1]["prompt"] == "hello"


@pytest.mark.setting("--lora-modules", "--lora-assignment", "--request-id-prefix")
def test_adapters_and_ids(fake: FakeOpenAI) -> None:
    words = ["--model", "m", "--lora-modules", "a", "b", "--max-concurrency", "1"]
    assert serve_bench(fake, *words, "--lora-assignment", "round-robin", "--request-id-prefix", "r-") == 0
    assert [body["model"] for body in fake.bodies] == ["a", "b"] * 3
    assert sorted(headers["x-request-id"] for headers in fake.headers) == [f"r-{index}" for index in range(6)]
    assert serve_bench(fake, *words, "--num-prompts", "40") == 0
    counts = Counter(body["model"] for body in fake.bodies[6:])
    assert min(counts["a"], counts["b"]) > 5
    names = [body["model"] for body in fake.bodies[6:]]
    assert names != ["a", "b"] * 20


# --- when ---


@pytest.mark.setting("--max-concurrency", "--num-warmups")
def test_max_concurrency(fake: FakeOpenAI) -> None:
    fake.may_answer = lambda body: fake.most == 6
    assert serve_bench(fake, "--model", "m") == 0
    assert (fake.most, len(fake.bodies)) == (6, 6)
    fake.most = 0
    fake.may_answer = lambda body: fake.most >= 2
    assert serve_bench(fake, "--model", "m", "--num-warmups", "3", "--max-concurrency", "2") == 0
    assert (fake.most, len(fake.bodies)) == (2, 6 + 3 + 6)
    assert fake.bodies[6] == fake.bodies[7] == fake.bodies[8]


def test_requests_are_sent_at_their_times(fake: FakeOpenAI) -> None:
    words = ["--request-rate", "20", "--burstiness", "inf", "--num-prompts", "8"]
    begun = time.perf_counter()
    assert serve_bench(fake, "--model", "m", *words) == 0
    assert all(arrival >= begun + index / 20 for index, arrival in enumerate(fake.arrivals)), "none is too early"
    assert len(fake.arrivals) == 8


@pytest.mark.setting("--self-timed")
def test_a_trace_sets_the_times(fake: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    rows = [{"timestamp": at, "input_length": 3, "output_length": 2} for at in (7.0, 7.0, 7.2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset-name", "timed_trace", "--dataset-path", str(file)]
    assert [each.arrival for each in planned(*words)] == pytest.approx([0.0, 0.0, 0.2])
    assert [each.arrival for each in planned(*words, "--no-self-timed")] == [0.0, 0.0, 0.0]
    begun = time.perf_counter()
    assert serve_bench(fake, "--model", "m", *words) == 0
    assert fake.arrivals[2] >= begun + 0.2
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_conversations_repeat_the_answers(fake: FakeOpenAI, backend: str) -> None:
    words = ["--dataset-name", "multi_turn", "--multi-turn-num-turns", "2", "--multi-turn-output-len", "3"]
    words += ["--num-prompts", "4", "--multi-turn-input-len", "2", "--backend", backend]
    assert serve_bench(fake, "--model", "m", *words) == 0
    content = "prompt" if backend == "openai" else "messages"
    ordered = sorted(fake.bodies, key=lambda body: len(body[content]))  # turns of two conversations may interleave
    firsts, seconds = ordered[:2], ordered[2:]
    if backend == "openai":
        assert {body["prompt"][:5] for body in seconds} == {body["prompt"] + "aaa" for body in firsts}
        return
    messages = {tuple(m["content"] for m in body["messages"][:2]) for body in seconds}
    assert messages == {(body["messages"][0]["content"], "aaa") for body in firsts}
    assert [m["role"] for m in seconds[0]["messages"]] == ["user", "assistant", "user"]


def test_a_conversation_ends_with_a_failure(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset-name", "multi_turn", "--multi-turn-num-turns", "2", "--multi-turn-input-len", "2"]
    (first, *_) = planned(*words, "--num-prompts", "4")
    fake.fail_prompts = {first.sample.text}
    assert serve_bench(fake, "--model", "m", "--num-prompts", "4", *words) == 1
    assert len(fake.bodies) == 3
    assert "2 of 4 requests failed, the first with: 400: refused" in capsys.readouterr().err


@pytest.mark.setting("--ready-check-timeout-sec")
def test_the_ready_check_waits(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    fake.loading = 1
    assert serve_bench(fake, "--model", "m", "--ready-check-timeout-sec", "20") == 0
    assert len(fake.bodies) == 1 + 1 + 6
    fake.loading = 99
    assert serve_bench(fake, "--model", "m", "--num-warmups", "1") == 1
    assert "503: loading" in capsys.readouterr().err
    assert serve_bench(fake, "--model", "m", "--ready-check-timeout-sec", "1") == 1
    assert "not ready after 1 s: 503: loading" in capsys.readouterr().err


@pytest.mark.setting("--probe-request-rate")
def test_probes(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    def num_probes() -> int:
        return [body["prompt"] for body in fake.bodies].count("Hi")

    fake.may_answer = lambda body: body["prompt"] == "Hi" or num_probes() >= 2
    words = ["--probe-request-rate", "20", "--max-concurrency", "1", "--num-prompts", "2"]
    assert serve_bench(fake, "--model", "m", *words) == 0
    probes = [body for body in fake.bodies if body["prompt"] == "Hi"]
    assert len(probes) >= 2
    assert {body["max_tokens"] for body in probes} == {1}
    assert fake.most == 2
    text = capsys.readouterr().out
    assert "Median probe E2EL (ms):" in text
    assert f"{'Successful requests:':<40}2" in text


@pytest.mark.setting("--profile")
def test_profile(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_bench(fake, "--model", "m", "--profile", "--num-warmups", "1") == 0
    posts = [path for path in fake.paths if path in ("/start_profile", "/stop_profile", "/v1/completions")]
    assert posts == ["/v1/completions", "/start_profile", *["/v1/completions"] * 6, "/stop_profile"]
    assert 'Trace of the load: {"path": "trace"}' in capsys.readouterr().out


@pytest.mark.setting("--insecure")
def test_insecure_reaches_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = []

    async def connect(*words: Any, ssl: Any) -> Any:
        contexts.append(ssl)
        raise OSError("no")

    async def measure(insecure: bool) -> Outcome:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
        endpoint = Endpoint("https://localhost/x", {}, read_completion, insecure=insecure)
        return await endpoint.measure({})

    for insecure in (False, True):
        assert asyncio.run(measure(insecure)).error == "no"
    assert [context.check_hostname for context in contexts] == [True, False]
    assert [context.verify_mode.name for context in contexts] == ["CERT_REQUIRED", "CERT_NONE"]
    assert load("--insecure").target.insecure


# --- what is shown and kept ---


@pytest.mark.setting("--disable-tqdm")
def test_disable_tqdm(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "serve",
        "--port",
        str(fake.port),
        "--num-prompts",
        "3",
        "--random-input-len",
        "4",
        "--model",
        "m",
    ]
    assert main.main(words) == 0
    assert "3/3" in capsys.readouterr().err
    assert main.main([*words, "--disable-tqdm"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.setting("--save-result", "--save-detailed", "--result-dir", "--result-filename", "--metadata", "--label")
@pytest.mark.setting("--append-result")
def test_results_are_saved(fake: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve_bench(fake, "--model", "a/m") == 0
    assert not list(tmp_path.iterdir())
    assert serve_bench(fake, "--model", "a/m", "--save-result", "--max-concurrency", "2") == 0
    (usual,) = tmp_path.iterdir()
    assert re.fullmatch(r"openai-infqps-concurrency2-m-\d{8}-\d{6}\.json", usual.name)
    more = ["--save-detailed", "--result-dir", "x/y", "--result-filename", "z.json", "--metadata", "chip=c", "run=1"]
    assert serve_bench(fake, "--model", "a/m", "--save-result", "--label", "mine", *more) == 0
    plain, results = json.loads(usual.read_text()), json.loads((tmp_path / "x" / "y" / "z.json").read_text())
    assert (results["chip"], results["run"], results["request_rate"], results["label"]) == ("c", "1", "inf", "mine")
    assert (results["completed"], results["total_output_tokens"], len(results["itls"][0])) == (6, 18, 2)
    assert (plain["backend"], plain["model_id"], plain["tokenizer_id"]) == ("openai", "a/m", "a/m")
    assert "itls" not in plain
    assert [len(plain[name]) for name in ("latencies", "queue_times")] == [6, 6], "as vLLM's have"
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "90", "--ramp-up-end-rps", "100"]
    assert serve_bench(fake, "--model", "m", "--save-result", "--result-dir", "r", "--label", "l", *ramp) == 0
    (ramped,) = (tmp_path / "r").iterdir()
    assert ramped.name.startswith("l-ramp-up-linear-90qps-100qps-m-")
    assert json.loads(ramped.read_text())["ramp_up_end_rps"] == 100.0
    for _ in range(2):
        assert serve_bench(fake, "--model", "m", "--append-result", "--result-filename", "many.jsonl") == 0
    lines = (tmp_path / "many.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [6, 6]


@pytest.mark.setting("--percentile-metrics", "--metric-percentiles")
def test_percentile_metrics(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_bench(fake, "--model", "m") == 0
    text = capsys.readouterr().out
    assert "P99 TTFT (ms):" in text
    assert "E2EL" not in text
    words = ["--percentile-metrics", "e2el,client_queue_time", "--metric-percentiles", "25,99.9"]
    assert serve_bench(fake, "--model", "m", "--max-concurrency", "3", *words) == 0
    text = capsys.readouterr().out
    assert "TTFT" not in text
    for row in ("Mean E2EL (ms):", "P25 E2EL (ms):", "P99.9 E2EL (ms):", "P25 Client Queue Time (ms):"):
        assert row in text


@pytest.mark.setting("--plot-timeline", "--timeline-itl-thresholds", "--plot-dataset-stats")
def test_plots_beside_the_results(fake: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(bench_serve, "need_matplotlib", lambda flag: None)
    monkeypatch.setattr(bench_serve, "plot_lengths", lambda outcomes, path: drawn.append((len(outcomes), path)))
    words = ["--plot-timeline", "--plot-dataset-stats", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert serve_bench(fake, "--model", "m", *words, "--timeline-itl-thresholds", "7,11") == 0
    (page,) = tmp_path.iterdir()
    assert page.name == "r.timeline.html"
    assert "7 to 11 ms" in page.read_text()
    assert drawn == [(6, tmp_path / "r.dataset_stats.png")]


def test_plots_need_matplotlib_before_the_load(fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert serve_bench(fake, "--model", "m", "--plot-dataset-stats") == 2
    assert "--plot-dataset-stats: needs matplotlib; install it: pip install 'pagoda[bench]'" in capsys.readouterr().err
    assert fake.bodies == []


# --- timings ---


async def measured(endpoint: Endpoint, *bodies: dict[str, Any]) -> list[Outcome]:
    outcomes = [await endpoint.measure(body, 9) for body in bodies]
    endpoint.close()
    return outcomes


def test_timings_are_those_of_the_arrivals(fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), SimpleQueue[float]()

    def look() -> float:
        """The time. The client looks at it when it starts and whenever it has read something."""
        looks.put(clock())
        return clock()

    monkeypatch.setattr("pagoda.server.bench.online.client.time", SimpleNamespace(perf_counter=look))
    fake.token_seconds, fake.pause = 0.03, clock.advance
    fake.may_answer = lambda body: looks.get(timeout=PATIENCE) > 0
    fake.after_sending = lambda: looks.get(timeout=PATIENCE)
    endpoint = Endpoint(f"http://127.0.0.1:{fake.port}/v1/completions", {}, read_completion)
    (outcome,) = asyncio.run(measured(endpoint, {"prompt": "x", "max_tokens": 4}))
    assert outcome.ttft == pytest.approx(0.03)
    assert outcome.gaps == pytest.approx([0.03] * 3)
    assert outcome.ttft + sum(outcome.gaps) == pytest.approx(outcome.latency)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (9, 4, "aaaa")  # usage was not requested


def test_connections_are_used_again(fake: FakeOpenAI) -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{fake.port}/v1/completions", {}, read_completion)
    body = {"prompt": "x", "max_tokens": 1}
    assert not any(each.error for each in asyncio.run(measured(endpoint, body, body, body)))
    assert len(fake.connections) == 1


def test_a_closed_connection_is_replaced() -> None:
    answers = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One answer, which promises to keep the connection; then close it."""
        nonlocal answers
        answers += 1
        await reader.readuntil(b"}")
        body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"}")
        writer.close()

    async def run() -> list[Outcome]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await measured(Endpoint(f"http://127.0.0.1:{port}/", {}, read_completion), {}, {}, {})

    assert [outcome.error for outcome in asyncio.run(run())] == ["", "", ""]
    assert answers == 3


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant", "content": "a"}}, True),
        ({"delta": {"content": ""}}, True),  # a token without text
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"tool_calls": [{}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"content": "a"}, "finish_reason": "stop"}, True),
    ],
)
def test_events_that_count_as_tokens(choice: dict[str, Any], counts: bool) -> None:
    assert read_chat({"choices": [choice]}).counts == counts


def test_a_failed_response_is_an_error() -> None:
    with pytest.raises(Exception, match="too long"):
        APIS["openai-responses"].read({"type": "response.failed", "response": {"error": {"message": "too long"}}})


# --- against pagoda's own server ---


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_key=("k",)) as server:
        yield server


@pytest.mark.command("bench serve")
@pytest.mark.parametrize("backend", ["openai", "openai-chat", "openai-responses"])
def test_a_server_under_load(
    server: LiveServer, backend: str, opened: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert serve_bench(server, "--backend", backend, "--random-output-len", "5") == 0
    assert opened == ["fake"]  # what the server says is behind its name
    text = capsys.readouterr().out
    assert f"{'Successful requests:':<40}6" in text
    assert f"{'Total generated tokens:':<40}30" in text
    if backend == "openai":
        assert f"{'Total input tokens:':<40}24" in text


def test_errors_of_a_server(server: LiveServer) -> None:
    async def request(path: str, **body: Any) -> Outcome:
        endpoint = Endpoint(server.url + path, {"authorization": "Bearer k"}, read_completion)
        return await endpoint.measure({"stream": True, **body}, 9)

    counted = asyncio.run(request("/v1/completions", prompt="a", max_tokens=4, stream_options={"include_usage": True}))
    assert (counted.prompt_tokens, counted.output_tokens, counted.error) == (1, 4, "")
    assert "404" in asyncio.run(request("/v1/nothing")).error
    assert "max_tokens" in asyncio.run(request("/v1/completions", prompt="a", max_tokens="x")).error
    assert "ended early" in asyncio.run(request("/v1/completions", prompt="a", max_tokens=1, stream=False)).error


def test_a_server_that_dies_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server("fake:crash") as server:
        assert serve_bench(server, "--random-output-len", "9") == 1
    printed = capsys.readouterr()
    assert f"{'Failed requests:':<40}6" in printed.out
    assert "pagoda: error: 6 of 6 requests failed, the first with: " in printed.err
    assert not math.isnan(float(re.findall(r"Mean TTFT \(ms\): +(\S+)", printed.out)[0]))


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--model", "m"]):
        assert main.main(["bench", "serve", "--port", "1", "--num-prompts", "1", *words]) == 1
        text = capsys.readouterr().err
        assert "is the server running?" in text
        assert text.count("\n") == 1


def test_a_missing_tokenizer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert main.main(["bench", "serve", "--model", "/no/such/folder"]) == 2
    assert "--tokenizer: /no/such/folder: " in capsys.readouterr().err
