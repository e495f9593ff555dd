"""`--explain-config` refuses what the command refuses: the same line, the same status, for every check before a load.

Each command line is run twice, in this process, as it is and with --explain-config.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.tiny_folder import write_model

from pagoda import LLM
from pagoda.backends.reference.backend import ReferenceBackend
from pagoda.common.errors import ConfigError
from pagoda.server.cli import main
from pagoda.server.http.state import ServerState
from pagoda.tests.common.weights.gguf.gguf_writing import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a server starts, instead of running for ever."""

    async def fail(self: ServerState) -> None:
        raise AssertionError("the server started")

    monkeypatch.setattr(ServerState, "until_dead", fail)


def line_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status and the error line."""
    capsys.readouterr()
    status = main.main(words)
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if line.startswith("pagoda: error: ")]
    return status, line


def both(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return how a command line ends, which must be the same with --explain-config."""
    explained, ran = line_of([*words, "--explain-config"], capsys), line_of(words, capsys)
    assert explained == ran
    return ran


SERVER = [
    ("--enable-log-outputs", "--enable-log-outputs: needs --enable-log-requests"),
    ("--tool-call-parser nope", "--tool-call-parser: unknown format 'nope'"),
    ("--reasoning-parser nope", "--reasoning-parser: unknown format 'nope'"),
    ("--tool-call-parser x --tool-parser-plugin no.module", "--tool-parser-plugin: no.module cannot be imported"),
    ("--chat-template /no/file", "--chat-template: /no/file: No such file"),
    ('--default-chat-template-kwargs {"messages":1}', "--default-chat-template-kwargs: it may not set 'messages'"),
    ("--ssl-certfile /no/c --ssl-keyfile /no/k", "--ssl-keyfile: /no/k: No such file"),
    ("--ssl-certfile /no/c", "--ssl-keyfile: TLS needs both"),
    ("--middleware no.such.thing", "--middleware: no.such.thing cannot be imported"),
    ("--middleware json.dumps", "--middleware: json.dumps is neither a class nor an async function"),
    ("--host host.invalid", "--host: host.invalid: "),
    ("--port TAKEN", "--port: cannot listen on 127.0.0.1:TAKEN"),
    ("--uds /no/folder/socket", "--uds: cannot listen on /no/folder/socket"),
    ("--log-config-file /no/such", "--log-config-file: /no/such: No such file"),
    ("--root-path //x", "--root-path: //x is not a URL path"),
    ("--headless", "--headless: there is no host 0 to follow"),
    ("--node-rank 1", "--node-rank: only host 0 serves HTTP"),
]
ENGINE = [
    ("--task transcription", "--task: 'transcription' is not supported: it needs audio input"),
    ("--backend nope", "--backend: nope is unknown"),
    ("--backend simulated", "--hardware: required with --backend simulated"),
    ("--backend simulated -dp 2", "--data-parallel-size: is not simulated; drop it"),
    ("--backend simulated --enable-lora", "--enable-lora: is not simulated; drop it"),
    ("--calibration c.json", "--calibration: it is for --backend simulated"),
    ("--acceptance-rate 0.5", "--acceptance-rate: it is for --backend simulated"),
    ("--backend torch_cuda", "--backend: torch_cuda: no NVIDIA GPU found"),
    ("-tp 2", "--tensor-parallel-size: reference runs a model on one device"),
    ("-dp 2", "--data-parallel-size: each replica needs an engine process of its own"),
    ("--distributed-executor-backend ray", "--distributed-executor-backend: reference drives all devices"),
    ("--enable-sleep-mode", "--enable-sleep-mode: reference cannot move its weights"),
    ("--cpu-offload-gb 1", "--cpu-offload-gb: reference cannot move its weights"),
    ("--quantization auto_awq", "--quantization: awq: the checkpoint is not quantised by it"),
    ("--quantization auto_gptq", "--quantization: gptq: the checkpoint is not quantised by it"),
    ("--quantization humming", "--quantization: 'humming' is not supported: it chooses a kernel of vLLM; drop it"),
    ("--quantization online", "--quantization: 'online' is not supported: it means the methods of --quantization-conf"),
    ("--quantization nvfp4_per_token", "--quantization: 'nvfp4_per_token' is not supported: no backend rounds activa"),
    (
        '--quantization-config {"linear":"mxfp8"}',
        "--quantization-config: {'linear': 'mxfp8'} is not supported: all matrices",
    ),
    ("--quantization quark", "--quantization: quark: the checkpoint is not quantised by it"),
    ("--quantization gguf", "--quantization: the model is not a GGUF file"),
    ("--load-format sharded_state", "--load-format: sharded_state is not read by reference"),
    ("--kv-cache-dtype fp8", "--kv-cache-dtype: the reference backend's cache"),
    ("--calculate-kv-scales", "--calculate-kv-scales: the reference backend has no 8-bit KV cache"),
    ("--attention-backend nope", "--attention-backend: 'nope': unknown"),
    ("--compiled-bundle /no/such", "--compiled-bundle: not supported by reference"),
    ("--plugins nope", "--plugins: plugin 'nope' is not installed"),
    ("--logits-processors no.such", "--logits-processors: no.such cannot be imported"),
    ("--logits-processors json.dumps", "--logits-processors: json.dumps: its constructor failed"),
    ("--scheduler-cls no.such", "--scheduler-cls: no.such cannot be imported"),
    ("--scheduler-cls json.JSONDecoder", "--scheduler-cls: json.JSONDecoder is not a scheduler"),
    ("--cpu-omp-threads-bind 7777", "--cpu-omp-threads-bind: core 7777 is not available to this process"),
    ("--generation-config /no/such", "--generation-config: /no/such/generation_config.json"),
    ("--hf-config-path /no/such", "--hf-config-path: /no/such"),
    ('--hf-overrides {"hidden_act":"no"}', "hidden_act"),
    ('--hf-overrides {"architectures":["No"]}', "No"),
    ("--tokenizer /no/such", "/no/such: no such file or folder"),
    ("--max-model-len 4096", "--max-model-len: 4096 "),
    (
        "--max-model-len 128 --num-gpu-blocks-override 2",
        "--max-model-len: a sequence of 128 tokens does not fit the KV",
    ),
    (
        "--max-model-len 128 --kv-cache-memory-bytes 20000",
        "--max-model-len: a sequence of 128 tokens does not fit the KV",
    ),
    ("--kv-cache-memory-bytes 1000", "--kv-cache-memory-bytes: 0 KV blocks of"),
    ("--kv-cache-memory-bytes 9T", "--kv-cache-memory-bytes: "),
    ("--num-gpu-blocks-override 9000000000", "--num-gpu-blocks-override: 9000000000 KV blocks take"),
    ("--kv-cache-dtype fp8_inc", "--kv-cache-dtype: 'fp8_inc' is not supported"),
    ("--pipeline-parallel-size 2", "--pipeline-parallel-size: 2 is not supported"),
    ("--load-format tensorizer", "--load-format: 'tensorizer' is not supported"),
    ("--load-format gguf", "no .gguf file in this folder"),
    ("--load-format pt", "no weights"),
    ("-q gtpq", "--quantization: 'gtpq' is not one of"),
    ("--quantization fp8 --model-impl transformers", "--quantization: is not supported with --model-impl transformers"),
    ("--task classify", "parameter pooler.classifier"),
    ('--hf-overrides {"num_hidden_layers":1}', "tensor model.layers.1."),
    ('--hf-overrides {"num_hidden_layers":3}', "parameter layers.2."),
    ("--no-enable-chunked-prefill --max-num-batched-tokens 64", "--max-num-batched-tokens: 64 is too small"),
    ("--enable-lora --max-loras 4 --max-cpu-loras 2", "--max-cpu-loras: 2 is below --max-loras 4"),
    ("--speculative-config.method ngram", "--speculative-config: method ngram needs num_speculative_tokens"),
    ("--speculative-config.method ngrm", "--speculative-config: method 'ngrm' is unknown; did you mean ngram?"),
    ("--spec-method eagle --spec-model x --spec-tokens 2", "--speculative-config: x: x: no such folder here"),
    (
        "--spec-method ngram --spec-tokens 9 --max-num-batched-tokens 8 --max-num-seqs 4",
        "--speculative-config: num_speculative_tokens is 9, but a step has 8 tokens",
    ),
    ("--spec-method suffix --runner pooling", "--speculative-config: is not supported for pooling models"),
    ("--structured-outputs-config.backend outlines", "--structured-outputs-config: backend outlines is not supported"),
    ("--structured-outputs-config.backend lm-format-enforcer", "backend lm-format-enforcer is not supported"),
    ("--guided-decoding-backend outlines", "--guided-decoding-backend: 'outlines' is not supported"),
    ("--runner pooling --enable-prompt-embeds", "--enable-prompt-embeds: is not supported for pooling models"),
    ("--runner generate --convert embed", "--convert: embed needs --runner pooling"),
    ('--runner pooling --pooler-config {"dimensions":5}', "--pooler-config: dimensions is 5"),
]
"""Refused by every command with an engine; errors of the model have exit status 1."""


@pytest.mark.setting("--explain-config")
@pytest.mark.parametrize(("words", "message"), SERVER + ENGINE)
def test_explain_of_serve_raises_what_the_start_would(
    words: str, message: str, folder: Path, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = [] if "--port" in words else ["--port", "0"]
    flags = [*words.replace("TAKEN", taken).split(), *port, "--disable-frontend-multiprocessing"]
    status, line = both(["serve", str(folder), *flags], capsys)
    assert message.replace("TAKEN", taken) in line
    assert status == (2 if line.startswith("pagoda: error: --") else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rpc-base-path /no/such", "--rpc-base-path: /no/such: No such file"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype: the reference backend's cache"),
        ("--tokenizer /no/such", "/no/such: no such file or folder"),
    ],
)
def test_serve_with_an_engine_process(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in both(["serve", str(folder), "--port", "0", *words.split()], capsys)[1]


@pytest.mark.parametrize("words", ["--kv-cache-dtype fp8", "--tokenizer /no/such", "--logits-processors no.such"])
@pytest.mark.parametrize("command", ["bench latency", "bench throughput", "run-batch -i INPUT -o OUTPUT"])
def test_explain_of_other_commands_raises_what_the_start_would(
    command: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("")
    line = command.replace("INPUT", str(tmp_path / "in")).replace("OUTPUT", str(tmp_path / "out"))
    both([*line.split(), "--model", str(folder), *words.split()], capsys)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, line = both(["serve", str(tmp_path / "none"), "--port", "0", "--disable-frontend-multiprocessing"], capsys)
    assert status == 1
    assert f"{tmp_path / 'none'}: no such file or folder" in line


GGUF = [
    ("--load-format pt", "is a file, but --load-format pt reads a folder"),
    ("--quantization awq", "--quantization: awq: the checkpoint is not quantised by it"),
    ("--model-impl transformers", "GGUF files are not read by --model-impl transformers"),
    ("--max-model-len 4096", "--max-model-len: 4096 exceeds"),
    ("--kv-cache-memory-bytes 1k", "--kv-cache-memory-bytes: 0 KV blocks"),
    ('--hf-overrides {"num_hidden_layers":1}', "belongs to no parameter of this model"),
]


@pytest.mark.parametrize(("words", "message"), GGUF)
def test_a_gguf_file(
    words: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(folder, tmp_path / "m.gguf", "llama")
    flags = ["--tokenizer", str(folder), "--port", "0", "--disable-frontend-multiprocessing", *words.split()]
    assert message in both(["serve", str(tmp_path / "m.gguf"), *flags], capsys)[1]


def test_a_start_refuses_before_it_reads_weights(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(ReferenceBackend, "load", lambda self, weights: read.append(True))
    flags = ["--port", "0", "--disable-frontend-multiprocessing", "--kv-cache-memory-bytes", "1000"]
    assert main.main(["serve", str(folder), *flags]) == 2
    assert "--kv-cache-memory-bytes" in capsys.readouterr().err
    assert read == []


def test_a_folder_without_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    words = ["serve", str(tmp_path / "model"), "--port", "0", "--disable-frontend-multiprocessing"]
    status, line = both(words, capsys)
    assert status == 1
    assert str(tmp_path) in line


@pytest.mark.setting("--structured-outputs-config")
@pytest.mark.parametrize("words", ["--structured-outputs-config.backend", "--guided-decoding-backend"])
@pytest.mark.parametrize(
    ("backend", "package", "extra"), [("xgrammar", "xgrammar", "xgrammar"), ("guidance", "llguidance", "structured")]
)
def test_a_structured_output_backend_that_is_not_installed(
    words: str,
    backend: str,
    package: str,
    extra: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = (
        f"--structured-outputs-config: backend {backend}: {package} is not installed; pip install 'pagoda[{extra}]'"
    )
    flags = ["--port", "0", "--disable-frontend-multiprocessing"]
    assert both(["serve", str(folder), *flags, words, backend], capsys) == (2, f"pagoda: error: {message}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(folder, structured_outputs_config={"backend": backend})
    monkeypatch.undo()
    assert importlib.util.find_spec("llguidance"), "the tests need it"
    assert main.main(["serve", str(folder), "--port", "0", words, "guidance", "--explain-config"]) == 0


def test_ray_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    ranks = ["--backend", "torch_cuda", "-tp", "2", "--distributed-executor-backend", "ray"]
    words = ["serve", str(folder), "--port", "0", "--disable-frontend-multiprocessing", *ranks]
    message = "--distributed-executor-backend: ray is not installed; pip install 'pagoda[ray]', or use mp"
    assert both(words, capsys) == (2, f"pagoda: error: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--backend torch_cuda --attention-backend FLASHINFER", "--attention-backend: FLASHINFER"),
        ("--backend torch_cuda -tp 2 --attention-backend FLASHINFER", "--attention-backend: FLASHINFER"),
        ("--backend torch_cuda -tp 3", "--tensor-parallel-size: 3 ranks cannot share"),
        (
            "--backend torch_cuda --kv-cache-dtype int8",
            "--kv-cache-dtype: torch_cuda has 8-bit caches of type fp8_e4m3 only",
        ),
        ("--backend torch_cuda --quantization fp4", "--quantization: 'fp4' is not one of "),
    ],
)
def test_torch_cuda(
    words: str,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    line = both(["serve", str(folder), "--port", "0", *words.split()], capsys)[1]
    assert message in line


class Processor:
    """A logits processor without effect."""

    def __init__(self, config: object) -> None:
        pass

    def apply(self, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-tp 99", "--tensor-parallel-size: 99"),
        ("--compiled-bundle /no/such", "--compiled-bundle: /no/such"),
        (f"--logits-processors {__name__}.Processor", "--logits-processors: jax_tpu keeps logits on the device"),
        ("--dtype float16", "--dtype: jax_tpu does not support float16"),
    ],
)
def test_jax_tpu(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    flags = ["--backend", "jax_tpu", "--disable-frontend-multiprocessing", "--port", "0"]
    assert message in both(["serve", str(folder), *flags, *words.split()], capsys)[1]


def test_explain_leaves_no_files_and_no_core_pinning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--uds", str(tmp_path / "socket"), "--rpc-base-path", str(tmp_path)]
    before = os.sched_getaffinity(0)
    assert main.main(["serve", str(folder), *words, "--cpu-omp-threads-bind", "0", "--explain-config"]) == 0
    assert "max_model_len" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert os.sched_getaffinity(0) == before
