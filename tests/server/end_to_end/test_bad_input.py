"""What cannot be used ends in one line that names the flag and what to do, exit status 2, and no traceback."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.suite.rows import each_row

from pagoda.server.cli import main


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line ends with."""
    status = status_of(words)
    said = capsys.readouterr()
    assert status == 2, said.err
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.err
    return said.err.rstrip("\n")


def status_of(words: Sequence[str]) -> object:
    """The exit status, whether the command returns it or the parser ends with it."""
    try:
        return main.main(list(words))
    except SystemExit as end:
        return end.code


CONTRADICTIONS = [
    ("a --model b", "--model: b differs from the positional MODEL a; give one of them"),
    ("--model a --model b", "--model: is given twice, as a and b; give it once"),
    ("a --config x --config y", "--config: is given twice, as x and y; give it once"),
    ("--attention-backend auto --attention-config.backend x", "--attention-config: "),
    (
        "--cudagraph-capture-sizes 1 --compilation-config.cudagraph_capture_sizes+ 2",
        "--cudagraph-capture-sizes: is also set in --compilation-config",
    ),
    (
        "--max-cudagraph-capture-size 1 --compilation-config.max_cudagraph_capture_size 2",
        "--max-cudagraph-capture-size: is also set in --compilation-config",
    ),
    ("--cuda-graph-sizes 1 --cudagraph-capture-sizes 2", "--max-cudagraph-capture-size: 1 differs from the largest"),
    ("--rope-theta 5 --hf-overrides.rope_theta 7", "--rope-theta: contradicts --hf-overrides; drop --rope-theta"),
    ("--device cpu --backend jax_tpu", "--device: contradicts --backend; drop --device"),
    ("--disable-log-requests --enable-log-requests", "--disable-log-requests: contradicts --enable-log-requests"),
    ("--tokens-only --no-skip-tokenizer-init", "--tokens-only: contradicts --skip-tokenizer-init"),
    ("--enable-log-outputs", "--enable-log-outputs: needs --enable-log-requests"),
    ("--ssl-keyfile k", "--ssl-certfile: TLS needs both"),
    (
        "--hf-overrides.a 1 --hf-overrides.a.b 2",
        "--hf-overrides.a.b: a is already set to a value that is not an object",
    ),
    ("--hf-overrides.a 1 --hf-overrides.a+ 2", "--hf-overrides.a+: a is already set to a value that is not a list"),
]
RANGES = [
    ("--port 70000", "--port: 70000 is not a port; use 1 to 65535"),
    ("--port x", "--port: 'x' is not an integer"),
    ("--max-num-seqs 0", "--max-num-seqs: 0 is not positive; use 1 or more, or drop it"),
    ("--max-num-seqs 1.5", "--max-num-seqs: '1.5' is not an integer"),
    (f"--max-num-seqs {2**64}", "--max-num-seqs: "),
    ("--max-model-len 1.5K", "did you mean 1.5k?"),
    ("--max-model-len 0", "--max-model-len: 0 is not a positive number of tokens"),
    ("--max-model-len -5", "--max-model-len: -5 is not a positive number of tokens"),
    ("--gpu-memory-utilization 2", "--gpu-memory-utilization: 2.0 is not in (0, 1]"),
    ("--gpu-memory-utilization nan", "--gpu-memory-utilization: 'nan' is not a number"),
    ("--block-size 12", "--block-size: 12 is not a power of two"),
    ("--kv-cache-memory-bytes 1.5G", "did you mean 1.5g?"),
    ("--uvicorn-log-level loud", "--uvicorn-log-level: 'loud' is not one of critical, error,"),
    ("--dtype float23", "did you mean float32?"),
    ("-O7", "--optimization-level: 7 is not 0, 1, 2 or 3"),
    ("-O", "-O: needs a level from 0 to 3, or a JSON object"),
    ("--pipeline-parallel-size 2", "--pipeline-parallel-size: 2 is not supported: "),
    ("-tp 0", "--tensor-parallel-size: 0 is not positive; use 1 or more"),
    ("-tp two", "--tensor-parallel-size: 'two' is not an integer"),
    ("-tp 2 --backend reference", "--tensor-parallel-size: reference runs a model on one device; use 1, or --backend "),
    ("--speculative-config.method ngram", "--speculative-config: "),
    ("--task draft", "--task: 'draft' is not supported: draft models belong to speculative decoding"),
    ("--api-key=", "--api-key: keys must not be empty"),
]
WORDS = [
    ("--max-modle-len 5", "unknown flag --max-modle-len; did you mean --max-model-len?"),
    ("--max_modle_len=5", "unknown flag --max-modle-len; did you mean --max-model-len?"),
    ("--zzz", "unknown flag --zzz"),
    ("--chip v6e", "unknown flag --chip; did you mean --hardware?"),
    ("--tensors 2", "unknown flag --tensors"),
    ("--ctx-size 5", "unknown flag --ctx-size; did you mean --max-model-len?"),
    ("--n_gpus=2", "unknown flag --n-gpus; did you mean --tensor-parallel-size?"),
    ("--max-num-se 5", "unknown flag --max-num-se; did you mean --max-num-seqs?"),
    ("-c 5", "unknown flag -c; did you mean -cc?"),
    ("-t 2", "unknown flag -t; did you mean -tp?"),
    ("a b", "unknown argument b"),
    ("--no-max-num-seqs", "unknown flag --no-max-num-seqs; did you mean --max-num-seqs?"),
    ("--max-num-seqs", "argument --max-num-seqs: expected one argument"),
    ("--async-scheduling=yes", "--async-scheduling"),
    ("--max-num-seqs.x 1", "--max-num-seqs is not a JSON setting and has no key x"),
    ("--hf-overrides.x", "--hf-overrides.x: needs a value"),
    ("--hf-overrides.x --port 5", "--hf-overrides.x: needs a value"),
    ("--hf-overrides. 5", "argument --hf-overrides.: needs a key after the dot"),
    ("-O=", "-O: needs a level from 0 to 3, or a JSON object"),
    ("--config=", "--config: the file name is empty; use --config FILE.yaml"),
    ("--hf-overrides..x 5", "--hf-overrides..x: has an empty key between dots"),
    ("--hf-overrides {", "--hf-overrides: '{': invalid JSON"),
    ("--hf-overrides [1]", "--hf-overrides: '[1]': must be a JSON object"),
    ("--hf-overrides=3", "--hf-overrides: '3': must be a JSON object"),
    ("--config /nowhere/x.yaml", "--config: /nowhere/x.yaml: No such file or directory"),
    ("--model a\udcff", "--model: "),
]


@pytest.mark.command("serve")
@each_row(("words", "message"), CONTRADICTIONS + RANGES + WORDS)
def test_serve_reports_bad_input_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(["serve", *words.split(" ")], capsys)


@each_row("command", ["run-batch -i a -o b", "bench latency", "bench throughput", "bench startup"])
@each_row(
    ("words", "message"),
    [
        ("--max-num-seqs 0", "--max-num-seqs: 0 is not positive; use 1 or more, or drop it"),
        ("--max-modle-len 5", "did you mean --max-model-len?"),
        ("--hf-overrides {", "--hf-overrides: '{': invalid JSON"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size: 2 is not supported: "),
        ("--model a --model b", "--model: is given twice"),
    ],
)
def test_other_commands_report_bad_input_in_one_line(
    command: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([*command.split(), *words.split()], capsys)


@pytest.mark.setting("--config")
@each_row("command", ["serve", "run-batch -i a -o b", "bench latency"])
@each_row(
    ("text", "message"),
    [
        ("max-num-seq: 5", "unknown key max-num-seq; did you mean max-num-seqs?"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "invalid YAML"),
        ("max-num-seqs: 0", "--max-num-seqs: 0 is not positive; use 1 or more, or drop it"),
        ("max-model-len: 1.5K", "did you mean 1.5k?"),
        ("pipeline-parallel-size: 2", "--pipeline-parallel-size: 2 is not supported: "),
        ("hf-overrides: 5", "--hf-overrides: "),
    ],
)
def test_invalid_files_are_one_error_line(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert message in refused([*command.split(), "--config", str(path)], capsys)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PAGODA_MAX_NUM_SEQS", "many", "PAGODA_MAX_NUM_SEQS: --max-num-seqs: 'many' is not an integer"),
        ("PAGODA_HF_OVERRIDES", "{", "PAGODA_HF_OVERRIDES: --hf-overrides: "),
        ("PAGODA_ENFORCE_EAGER", "perhaps", "PAGODA_ENFORCE_EAGER: --enforce-eager: 'perhaps' is not true or false"),
    ],
)
def test_invalid_variables_are_one_error_line(
    name: str, value: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert message in refused(["serve", "m"], capsys)


@pytest.mark.setting("--log-error-stack")
@each_row("flag", ["--log-error-stack", "--log_error_stack"])
@each_row("command", ["serve", "run-batch -i a -o b", "bench latency", "chat"])
def test_traceback_is_shown_on_request(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-tokens", "0"] if command == "chat" else ["--max-num-seqs", "0"]
    assert main.main([*command.split(), *words, flag]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert f"{words[0]}: 0 is not positive; use 1 or more" in said.splitlines()[-1]


def test_process_prints_one_error_line(tmp_path: Path) -> None:
    """As a shell sees it: the status, one line, nothing on the standard output."""
    (tmp_path / "c.yaml").write_text("max-num-seqs: 0")
    done = subprocess.run(
        [sys.executable, "-m", "pagoda.server.cli.main", "serve", "m", "--config", str(tmp_path / "c.yaml")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pagoda: error: --max-num-seqs: 0 is not positive; use 1 or more, or drop it\n"
