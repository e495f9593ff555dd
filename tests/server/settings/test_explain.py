"""`--explain-config`: the value, source and reason of every setting, without starting anything."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.settings import ENGINE_SETTINGS
from pagoda.server.cli import main


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a free port: a port in use is refused."""
    monkeypatch.setenv("PAGODA_PORT", "0")


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, ...]]:
    """Return setting -> value, source and reason."""
    assert main.main([*words, "--explain-config"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    rows = [re.split(r"  +", line.strip()) for line in lines]
    return {name: tuple(rest) for name, *rest in rows}


@pytest.mark.model
@pytest.mark.setting("--explain-config")
@pytest.mark.parametrize("command", ["serve", "run-batch", "bench latency", "bench throughput", "bench startup"])
def test_every_setting_has_its_row(command: str, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("-i", "in.jsonl", "-o", "out.jsonl") if command == "run-batch" else ()
    rows = explained(capsys, *command.split(), "--model", str(model_file), *files)
    old = {name for name, setting in ENGINE_SETTINGS.items() if setting.group == "DeprecatedConfig"}
    assert set(rows) >= set(COMMAND_SETTINGS[command]) - old
    assert all(len(row) in (2, 3) for row in rows.values())
    assert rows["model"] == (str(model_file), "flag")
    assert rows["swap_space"] == ("4.0", "default")


@pytest.mark.model
@pytest.mark.setting("--explain-config", "--config")
def test_explain_shows_the_source_of_values(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 3\nuvicorn-log-level: error\nhf-overrides: {rope_theta: 7}\n")
    monkeypatch.setenv("PAGODA_BLOCK_SIZE", "8")
    monkeypatch.setenv("PAGODA_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("PAGODA_HOST", "127.0.0.2")
    rows = explained(capsys, "serve", str(model_file), "--config", str(file), "--stream-interval", "2")
    assert rows["stream_interval"] == ("2", "flag")
    assert rows["max_num_seqs"] == ("3", f"file {file}")
    assert rows["uvicorn_log_level"] == ("error", f"file {file}")
    assert rows["port"] == ("0", "environment PAGODA_PORT")
    assert rows["hf_overrides"] == ('{"rope_theta": 7}', f"file {file}")
    assert rows["block_size"] == ("8", "environment PAGODA_BLOCK_SIZE")
    assert rows["host"] == ("127.0.0.2", "environment PAGODA_HOST")
    assert rows["max_model_len"][:2] == ("8192", "model")
    assert rows["backend"][1] == "platform default"
    assert rows["response_role"] == ("assistant", "default")


@pytest.mark.model
@pytest.mark.setting("--explain-config", "--distributed-executor-backend", "--tensor-parallel-size")
def test_explain_shows_the_executor_of_ranks(
    model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    words = ("serve", str(model_file), "--backend", "torch_cuda")
    assert explained(capsys, *words)["distributed_executor_backend"][:2] == ("uni", "default")
    assert explained(capsys, *words, "-tp", "3")["distributed_executor_backend"][:2] == ("mp", "default")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    ray = explained(capsys, *words, "-tp", "3", "--distributed-executor-backend", "ray")
    assert ray["distributed_executor_backend"][:2] == ("ray", "flag")
    assert main.main([*words, "-tp", "2", "--explain-config"]) == 2
    assert "--tensor-parallel-size: 2 ranks cannot share 9 query heads evenly; use 1" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.setting("--explain-config")
def test_defaults_depend_on_the_command(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = explained(capsys, "serve", str(model_file))
    offline = explained(capsys, "bench", "throughput", "--model", str(model_file))
    assert int(server["max_num_batched_tokens"][0]) * 16 == int(offline["max_num_batched_tokens"][0])
    assert "API server" in server["max_num_batched_tokens"][2]


@pytest.mark.model
def test_deprecated_flags_are_shown_if_given(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = explained(capsys, "serve", str(model_file), "--rope-theta", "100000", "--swap-space", "1")
    assert rows["swap_space"] == ("1.0", "flag", "no effect: preempted requests are recomputed, not swapped")
    assert rows["rope_theta"] == ("100000.0", "flag", "deprecated: use --hf-overrides.rope_theta")
    assert rows["hf_overrides"][:2] == ('{"rope_theta": 100000.0}', "flag --rope-theta")
    assert "task" not in rows


@pytest.mark.model
def test_secrets_are_not_shown(
    model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert main.main(["serve", str(model_file), "--hf-token", "hf_sesame", "--explain-config"]) == 0
    said = capsys.readouterr()
    assert "sesame" not in said.out + said.err
    assert "***" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "--port: 99999 is not a port"),
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is not positive"),
        (["-tp", "2", "--backend", "reference"], "--tensor-parallel-size: reference runs a model on one device"),
    ],
)
def test_explain_raises_what_the_start_would(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", "m", *words, "--explain-config"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
