"""Several engines in `bench throughput`: processes that work in turns, ratios of the rounds, arguments of each."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.suite.watching import eventually

from pagoda.common.errors import PagodaError
from pagoda.server.bench.offline import throughput
from pagoda.server.bench.peers.compare import EngineSpec, EngineWorkload, measure, summary, weight_bytes, workers_of
from pagoda.server.cli import main

ENGINE = """
import json, os, time
class SamplingParams:
    def __init__(self, **fields): self.fields = fields
class Answer:
    def __init__(self, count): self.outputs = [self]; self.token_ids = [0] * count
class LLM:
    now = 1.0
    def __init__(self, **options):
        print("noise on stdout")
        if options.get("fail"): raise RuntimeError("no such model")
        self.options = options
        time.perf_counter = lambda: LLM.now  # the worker's clock
    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        if len(prompts) == 7: raise RuntimeError("seven prompts")
        with open(self.options["log"], "a") as file:
            file.write(json.dumps([self.options["model"], [p["prompt_token_ids"] for p in prompts]]) + "\\n")
        LLM.now += self.options["seconds"]
        return [Answer(each.fields["max_tokens"]) for each in params]
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `vllm` that takes the time a request states; the file where it logs its calls."""
    (tmp_path / "vllm.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "log"


def spec(name: str, log: Path, seconds: float, **more: Any) -> EngineSpec:
    return EngineSpec(name, "vllm", {"model": name, "log": str(log), "seconds": seconds, **more})


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_engines_work_in_turns(engine: Path) -> None:
    work = EngineWorkload([[1, 2], [3]], [4, 6])
    with workers_of([spec("fast", engine, 0.5), spec("slow", engine, 2.0)]) as workers:
        pids = [worker._process.pid for worker in workers]
        eventually(lambda: all(is_stopped(pid) for pid in pids))
        result = measure(workers, work, 2)
        assert workers[0].version == "unknown"
    calls = [json.loads(line) for line in engine.read_text().splitlines()]
    assert calls == [[name, [[1, 2], [3]]] for name in ("fast", "slow", "fast", "slow")]
    assert result["fast"]["output_tokens_per_s"] == pytest.approx([20.0, 20.0])
    assert result["slow"]["median"] == pytest.approx(5.0)
    assert result["ratios"]["slow"]["median"] == pytest.approx(4.0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ratios_are_of_the_same_round() -> None:
    result = summary({"pagoda": [10.0, 30.0, 20.0], "vllm": [10.0, 10.0, 10.0], "llama.cpp": [40.0, 40.0, 40.0]})
    assert result["pagoda"]["median"] == 20.0
    assert result["ratios"]["vllm"] == {"rounds": [1.0, 3.0, 2.0], "median": 2.0}
    assert result["ratios"]["llama.cpp"]["rounds"] == [0.25, 0.75, 0.5]


def test_an_engine_that_fails(engine: Path) -> None:
    with (
        pytest.raises(PagodaError, match="one failed: RuntimeError: no such model"),
        workers_of([spec("one", engine, 0.0, fail=True)]),
    ):
        pass
    with (
        pytest.raises(PagodaError, match="one failed: RuntimeError: seven prompts"),
        workers_of([spec("one", engine, 0.0)]) as (worker,),
    ):
        worker.run(EngineWorkload([[1]] * 7, [1] * 7))


class FakeWorker:
    """Takes a number of seconds for each run."""

    runs: tuple[tuple[str, int], ...] = ()

    def __init__(self, spec: EngineSpec, seconds: float) -> None:
        self.spec, self.seconds, self.version = spec, seconds, "1.0"

    def run(self, work: EngineWorkload, *, busy: bool = False) -> tuple[float, int]:
        FakeWorker.runs = (*FakeWorker.runs, (self.spec.name, len(work.prompts)))
        return self.seconds, sum(work.outputs)


@pytest.mark.setting("--backend", "--peer-python", "--peer-model", "--peer-args", "--rounds")
@pytest.mark.setting("--hf-max-batch-size", "--hf-enable-torch-compile")
def test_one_command_compares_engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    specs: list[EngineSpec] = []

    @contextmanager
    def started(chosen: Sequence[EngineSpec]) -> Iterator[list[FakeWorker]]:
        specs.extend(chosen)
        yield [FakeWorker(each, seconds) for each, seconds in zip(chosen, (1.0, 2.0, 4.0, 8.0))]

    monkeypatch.setattr(throughput, "workers_of", started)
    monkeypatch.setattr(throughput, "open_tokenizer", lambda config: byte_tokenizer())
    (tmp_path / "m.gguf").write_bytes(b"x" * 2_000_000)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 9_000_000)
    FakeWorker.runs = ()
    words = ["--backend", "reference,vllm,transformers,llama.cpp", "--rounds", "2", "--num-prompts", "5"]
    words += ["--peer-python", "vllm=/v/python", "--peer-model", f"llama.cpp={tmp_path / 'm.gguf'}"]
    words += ["--peer-args", 'vllm={"gpu_memory_utilization": 0.4}', "--hf-max-batch-size", "3"]
    words += ["--hf-enable-torch-compile", "--input-len", "4", "--output-len", "8", "--max-model-len", "64"]
    file = tmp_path / "r.json"
    assert main.main(["bench", "throughput", "--model", str(tmp_path), *words, "--output-json", str(file)]) == 0
    names = ["pagoda", "vllm", "transformers", "llama.cpp"]
    assert FakeWorker.runs == (*((name, 1) for name in names), *((name, 5) for name in names * 2))
    options = {each.name: each.options for each in specs}
    assert options["pagoda"] == {"model": str(tmp_path), "max_model_len": 64, "backend": "reference"}
    assert options["vllm"] == {"model": str(tmp_path), "max_model_len": 64, "gpu_memory_utilization": 0.4}
    assert options["transformers"] == {"model": str(tmp_path), "batch_size": 3, "compile": True, "dtype": "auto"}
    assert options["llama.cpp"] == {"model": str(tmp_path / "m.gguf"), "max_model_len": 64}
    assert [each.python == "/v/python" for each in specs] == [False, True, False, False]
    results = json.loads(file.read_text())
    assert results["engines"]["ratios"]["transformers"]["rounds"] == [4.0, 4.0]
    assert results["engines"]["pagoda"]["median"] == results["output_tokens_per_second"] == 40.0
    assert (results["weight_bytes"]["vllm"], results["weight_bytes"]["llama.cpp"]) == (9_000_000, 2_000_000)
    assert results["machine"]["cpu"]
    text = capsys.readouterr().out
    assert "bfloat16 instructions" in text.splitlines()[0]
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("llama.cpp")] == [["8.00", "x"]]
    assert "weights of different sizes" in text


def test_one_other_engine_alone(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput, "open_tokenizer", lambda config: byte_tokenizer())
    more = json.dumps({"log": str(engine), "seconds": 1})
    words = [
        "--backend",
        "vllm",
        "--rounds",
        "1",
        "--num-prompts",
        "2",
        "--input-len",
        "4",
        "--peer-args",
        f"vllm={more}",
    ]
    assert main.main(["bench", "throughput", "--model", "m", *words]) == 0
    assert "vllm" in capsys.readouterr().out
    assert len(engine.read_text().splitlines()) == 2


def test_sizes_of_weights(tmp_path: Path) -> None:
    assert weight_bytes(str(tmp_path / "none")) is None
    assert weight_bytes(str(tmp_path)) is None
    (tmp_path / "a.safetensors").write_bytes(b"123")
    (tmp_path / "b.bin").write_bytes(b"12")
    assert weight_bytes(str(tmp_path)) == 5
    assert weight_bytes(str(tmp_path / "b.bin")) == 2
