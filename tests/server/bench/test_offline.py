"""The offline benchmarks over a fake engine: settings reach the requests, errors are one line."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM
from support.engines.fake_engine import build as build_fake

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.bench.offline import StartupConfig
from pagoda.common.observe.metrics import Metrics
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.bench.offline import latency as bench_latency
from pagoda.server.bench.offline import startup as bench_startup
from pagoda.server.bench.offline import throughput as bench_throughput
from pagoda.server.bench.offline.engine import engine_keywords
from pagoda.server.bench.report.machine import machine, processor_kind
from pagoda.server.cli import main
from pagoda.server.core_client import engine_processes
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.replica_client import ReplicaClient
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs

TESTS = Path(__file__).resolve().parents[2]
TEXT = byte_tokenizer()


def open_text(config: EngineConfig) -> Tokenizer | None:
    return None if config.model.skip_tokenizer_init else TEXT


class RecordingLLM(LLM):
    """Records each call of generate, and the adapters that it names, which the fake engine does not have."""

    calls: tuple[Any, ...] = ()
    adapters: Any = None

    def generate(self, prompts: Any, sampling_params: Any = None, *, lora_request: Any = None, **more: Any) -> Any:
        self.calls = (*self.calls, (prompts, sampling_params))
        self.adapters = lora_request
        return super().generate(prompts, sampling_params, **more)

    def beam_search(self, prompts: Any, params: Any, *words: Any, **more: Any) -> Any:
        self.calls = (*self.calls, (prompts, params))
        return []


def bench(command: str, monkeypatch: pytest.MonkeyPatch, *words: str, status: int = 0) -> Sequence[Any]:
    """Runs an offline benchmark over the fake engine; the calls of generate."""
    return llm_of(command, monkeypatch, *words, status=status).calls


def llm_of(command: str, monkeypatch: pytest.MonkeyPatch, *words: str, status: int = 0) -> RecordingLLM:
    module = {"latency": bench_latency, "throughput": bench_throughput}[command]
    llms: list[RecordingLLM] = []

    def start(engine_args: EngineArgs) -> LLM:
        engine = LLMEngine(engine_args.create_engine_config(), build=build_fake, open_text=open_text)
        llms.append(RecordingLLM.from_engine(engine))
        return llms[0]

    monkeypatch.setattr(module, "start_llm", start)
    assert main.main(["bench", command, "--model", "fake", *words]) == status
    return llms[0]


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
    assert results["machine"]["cores"] >= 1
    calls = bench("latency", monkeypatch, *words[:-1], "--disable-detokenize")
    assert not calls[0][1].detokenize


@pytest.mark.setting("--use-beam-search", "--n")
def test_latency_of_beam_search(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "0",
    ]
    calls = bench("latency", monkeypatch, *words, "--use-beam-search", "--n", "3")
    beams = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
    assert [(len(prompts), params) for prompts, params in calls] == [(2, beams)] * 2
    assert "Avg latency: " in capsys.readouterr().out


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
    assert len(prompts) == len(params) == 5
    assert not any(each.detokenize for each in params)
    assert {(each.max_tokens, each.n, each.ignore_eos) for each in params} == {(4, 2, True)}
    text = capsys.readouterr().out
    assert re.search(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s", text)
    assert "Total num prompt tokens:  40" in text
    assert "Total num output tokens:  40" in text
    results = json.loads(file.read_text())
    assert (results["num_requests"], results["total_num_tokens"], results["model_id"]) == (5, 80, "fake")
    assert results["machine"]["cpu"]


@pytest.mark.setting("--num-warmups", "--prefix-len")
def test_throughput_of_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--num-prompts", "6", "--input-len", "10", "--output-len", "8", "--random-range-ratio", "0.5"]
    (_, _), (prompts, params) = bench("throughput", monkeypatch, *words, "--prefix-len", "3", "--num-warmups", "2")
    assert len({tuple(each["prompt_token_ids"][:3]) for each in prompts}) == 1
    assert len({len(each["prompt_token_ids"]) for each in prompts}) > 1
    assert len({each.max_tokens for each in params}) > 1
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "ab", "output_tokens": 3}\n')
    custom = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(file),
        "--custom-output-len",
        "-1",
        "--num-prompts",
        "2",
    ]
    ((prompts, params),) = bench("throughput", monkeypatch, *custom, "--skip-chat-template")
    assert [each["prompt_token_ids"] for each in prompts] == [[97, 98]] * 2
    assert [each.max_tokens for each in params] == [3, 3]


@pytest.mark.setting("--lora-path", "--lora-assignment")
def test_throughput_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--num-prompts", "4", "--input-len", "2", "--output-len", "1", "--enable-lora", "--max-loras", "2"]
    words += ["--lora-path", "folder"]
    llm = llm_of("throughput", monkeypatch, *words, "--lora-assignment", "round-robin")
    copies = [("bench-1", "folder"), ("bench-2", "folder")]
    assert [(each.lora_name, each.lora_path) for each in llm.adapters] == copies * 2
    many = llm_of("throughput", monkeypatch, *words, "--num-prompts", "30")
    names = [each.lora_name for each in many.adapters]
    assert set(names) == {"bench-1", "bench-2"}
    assert names != ["bench-1", "bench-2"] * 15


@pytest.mark.setting("--profile")
def test_throughput_writes_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--input-len", "4", "--output-len", "2", "--num-prompts", "2", "--profile"]
    words += ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(tmp_path)]
    assert len(bench("throughput", monkeypatch, *words)) == 1
    assert re.search(r"^Trace of all requests: pagoda_\S+$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *(("latency", [flag, "0"]) for flag in ("--input-len", "--output-len", "--batch-size", "--n", "--num-iters")),
        ("latency", ["--num-iters-warmup", "-1"]),
        ("latency", ["--disable-detokenize", "--use-beam-search"]),
        ("latency", ["--profile"]),
        *(("throughput", [flag, "0"]) for flag in ("--input-len", "--output-len", "--num-prompts", "--n", "--rounds")),
        ("throughput", ["--num-warmups", "-1"]),
        ("throughput", ["--backend", "mii"]),
        ("throughput", ["--backend", "pagoda,reference"]),
        ("throughput", ["--rounds", "5"]),
        ("throughput", ["--peer-python", "vllm=python"]),
        ("throughput", ["--peer-model", "x"]),
        ("throughput", ["--peer-args", "vllm={}"]),
        ("throughput", ["--peer-args", "vllm=[]", "--backend", "vllm"]),
        ("throughput", ["--n", "2", "--backend", "pagoda,vllm"]),
        ("throughput", ["--lora-path", "x"]),
        ("throughput", ["--profile"]),
        ("throughput", ["--async-engine", "--backend", "pagoda,vllm"]),
        ("throughput", ["--data-parallel-size", "2", "--backend", "reference"]),
        ("throughput", ["--hf-max-batch-size", "3"]),
        ("throughput", ["--hf-enable-torch-compile"]),
        ("throughput", ["--dataset-name", "multi_turn"]),
        ("throughput", ["--random-batch-size", "2"]),
        ("throughput", ["--hf-name", "x"]),
        ("throughput", ["--peer-model", "llama.cpp=x", "--backend", "pagoda,llama.cpp"]),
        *(("startup", [flag, "-1"]) for flag in ("--num-iters-cold", "--num-iters-warm")),
        ("startup", ["--num-iters-warm", "0"]),
        *(("startup", [flag, "0"]) for flag in ("--input-len", "--num-iters")),
        ("startup", ["--num-iters-warmup", "-1"]),
    ],
)
def test_offline_errors_are_one_line(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", command, "--model", "fake", *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"pagoda: error: {words[0]}: ")
    assert text.count("\n") == 1


@pytest.mark.setting("--async-engine", "--data-parallel-size")
def test_throughput_of_an_engine_per_replica(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[AsyncLLM] = []

    def start(engine_args: EngineArgs) -> bench_throughput.AsyncEngine:
        config = engine_args.create_engine_config()
        client = ReplicaClient([ProcessClient(each.config, PROGRAM) for each in engine_processes(config)])
        started.append(AsyncLLM(config, client=client, open_text=open_text, metrics=Metrics("fake", 2)))
        return bench_throughput.AsyncEngine(started[0], asyncio.Runner())

    monkeypatch.setattr(bench_throughput, "start_async", start)
    file = tmp_path / "r.json"
    words = ["--async-engine", "--backend", "reference", "--data-parallel-size", "2", "--output-json", str(file)]
    words += ["--num-prompts", "6", "--input-len", "4", "--output-len", "3", "--num-warmups", "1"]
    assert main.main(["bench", "throughput", "--model", "fake:slow", *words]) == 0
    assert "requests/s" in capsys.readouterr().out
    results = json.loads(file.read_text())
    assert (results["num_requests"], results["total_output_tokens"], results["total_num_tokens"]) == (6, 18, 42)
    assert started[0].stats.running == 0
    registry = started[0].metrics.registry
    counts = [
        registry.get_sample_value("vllm:generation_tokens_total", {"model_name": "fake", "engine": str(index)})
        for index in range(2)
    ]
    assert sum(counts) == 7 * 3
    assert min(counts) >= 6


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_request_above_the_context(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(command, monkeypatch, "--input-len", "60", "--output-len", "5", status=2) == ()
    assert "--output-len: 60 + 5 tokens exceed the context of 64" in capsys.readouterr().err


def test_startup_settings_reach_the_server() -> None:
    words = ["--model", "m", "--max-model-len", "2k", "--hf-overrides.a", "1", "--no-enable-prefix-caching"]
    parser = main.parser_of("bench startup", main.BENCH["startup"])
    _, settings = bench_startup.resolve_load(parser.parse_args(words), bench_startup.COMMAND, StartupConfig)
    passed = json.loads(json.dumps(engine_keywords(settings)))
    assert passed == {"model": "m", "max_model_len": 2000, "hf_overrides": {"a": 1}, "enable_prefix_caching": False}


@pytest.mark.setting("--num-iters", "--num-iters-warmup", "--input-len", "--output-json", "--num-iters-cold")
@pytest.mark.setting("--num-iters-warm")
def test_startup_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    seconds = iter([7.0, 9.0, 100.0, 100.0, 1.0, 2.0, 6.0, 5.0])

    def start(settings: Path, input_len: int, *, cold: bool) -> float:
        started.append((json.loads(settings.read_text()), input_len, cold))
        return next(seconds)

    monkeypatch.setattr(bench_startup, "time_start", start)
    file = tmp_path / "r.json"
    words = ["--num-iters", "3", "--num-iters-warmup", "2", "--input-len", "5", "--output-json", str(file)]
    assert main.main(["bench", "startup", "--model", "m", "--max-num-seqs", "4", *words, "--num-iters-cold", "2"]) == 0
    settings = {"model": "m", "max-num-seqs": 4}
    assert started == [(settings, 5, True)] * 2 + [(settings, 5, False)] * 5
    results = json.loads(file.read_text())
    assert (results["avg_startup"], results["median_startup"], results["startups"]) == (3.0, 2.0, [1.0, 2.0, 6.0])
    assert (results["avg_cold_startup_time"], results["cold_startup_times"]) == (8.0, [7.0, 9.0])
    assert results["warm_startup_percentiles"]["50"] == 2.0
    assert "Median time to first token: 2.000 seconds" in capsys.readouterr().out
    words = ["--num-iters-warm", "1", "--num-iters-warmup", "0", "--output-json", str(file)]
    assert main.main(["bench", "startup", "--model", "m", *words]) == 0
    assert json.loads(file.read_text())["warm_startup_times"] == [5.0]


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_startup, "SERVE", (sys.executable, str(TESTS / "support" / "servers" / "fake_serve.py")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *(path for path in sys.path if path)]))


@pytest.mark.command("bench startup")
@pytest.mark.usefixtures("fake_serve")
def test_startup_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "startup", "--model", "fake", "--num-iters", "1", "--num-iters-warmup", "0"]) == 0
    assert "of 1 starts" in capsys.readouterr().out


def test_a_cold_start_has_empty_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    class Started:
        def __init__(self, words: Any, env: dict[str, str], **more: Any) -> None:
            seen.append({name: env.get(name) for name in bench_startup.CACHES})

        def send_signal(self, number: int) -> None:
            pass

        def wait(self, seconds: float = 0) -> None:
            pass

    for name in bench_startup.CACHES:
        monkeypatch.setenv(name, "usual")
    monkeypatch.setattr(bench_startup.subprocess, "Popen", Started)
    for cold in (False, True):
        with bench_startup._server(tmp_path / "s.yaml", 1, cold):
            pass
    assert set(seen[0].values()) == {"usual"}
    assert all(value and value != "usual" for value in seen[1].values())
    assert not any(Path(value or "").exists() for value in seen[1].values())


@pytest.mark.usefixtures("fake_serve")
def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "startup", "--model", "fake:config", "--num-iters-warmup", "0"]) == 1
    assert "pagoda: error: the server did not start: --dtype: not today; use another" in capsys.readouterr().err


# --- the machine ---


@pytest.mark.parametrize(
    ("flags", "instructions", "bf16"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16", ["avx2", "avx512f", "avx512_bf16", "amx_bf16"], True),
        ("flags\t\t: fpu avx2", ["avx2"], False),
        ("Features\t: fp asimd bf16", ["asimd", "bf16"], True),
    ],
)
def test_the_kind_of_processor(
    flags: str, instructions: list[str], bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{flags}\n")
    monkeypatch.setattr("pagoda.server.cli.diagnosis.machine._PROCESSORS", info)
    facts = machine()
    assert (facts["cpu"], facts["instructions"], facts["bf16_instructions"]) == ("Some CPU", instructions, bf16)
    assert ("without" in processor_kind(facts)) != bf16
    monkeypatch.setattr("pagoda.server.cli.diagnosis.machine._PROCESSORS", tmp_path / "none")
    assert machine()["instructions"] == []
