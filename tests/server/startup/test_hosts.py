"""Two hosts on one machine: processes of one CPU device each, which share a model and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flax")

from support.checkpoints.tiny_folder import write_model
from support.servers.served import REAL, environment, served, wait_ready
from support.suite.own_address import OWN_ADDRESS, own_port
from support.suite.watching import PATIENCE, programs

from pagoda.common.backend import ParallelSizes
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.settings import ENGINE_SETTINGS
from pagoda.common.distributed.messages import Host, HostFingerprint
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli.main import main
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.hosts import SHARED_SETTINGS, check_devices, cluster_token

PROMPTS = ([5, 17, 3, 80, 41, 2, 9], [60, 33, 21])
SMALL: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": 32}
FLAGS = tuple(word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model, and with the programs that the first pair of hosts compiles."""
    path = tmp_path_factory.mktemp("hosts")
    write_model(path / "tiny")
    return path


def shared_flags(folder: Path, port: int) -> tuple[str, ...]:
    together = ("--backend", "jax_tpu", "-tp", "2", "--nnodes", "2", "--master-addr", OWN_ADDRESS)
    return (*together, "--master-port", str(port), "--xla-cache-path", str(folder / "xla"), *FLAGS)


@contextmanager
def follower(model: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Host 1."""
    words = [sys.executable, *REAL, str(model), "--headless", "--node-rank", "1", *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def pair(folder: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], str]]:
    """Return host 0, host 1 and the address of host 0, once both are warm."""
    flags, model = shared_flags(folder, own_port()), folder / "tiny"
    first_host = served(str(model), *flags, "--served-model-name", "m", program=REAL)
    with follower(model, *flags) as second, first_host as (first, url):
        wait_ready(first)
        yield first, second, url


def tokens(url: str, prompt: list[int]) -> list[int]:
    """Return the greedy output, six tokens."""
    asked = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)["choices"][0]["token_ids"]


def last_line(process: subprocess.Popen[str]) -> str:
    """Return the last error line on stderr."""
    _, log = process.communicate(timeout=PATIENCE)
    return [line for line in log.splitlines() if line.startswith("pagoda: error: ")][-1]


def engine_of(process: subprocess.Popen[str]) -> int:
    """Return the process id of its engine."""
    (child,) = programs(process.pid)
    return child


@pytest.mark.variable("PAGODA_CLUSTER_TOKEN")
@pytest.mark.setting("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
def test_two_hosts_generate_as_one_and_end_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CLUSTER_TOKEN", "a secret of many characters")
    alone = LLM(str(folder / "tiny"), backend="reference", dtype="float32", disable_log_stats=True, **SMALL)
    rules = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = alone.generate([{"prompt_token_ids": ids} for ids in PROMPTS], rules, use_tqdm=False)
    with pair(folder) as (first, second, url):
        for prompt, answer in zip(PROMPTS, want):
            assert tokens(url, prompt) == list(answer.outputs[0].token_ids)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE) == 0
        assert second.wait(PATIENCE) == 0


OFFLINE = """
import json, sys
from pagoda import LLM, SamplingParams
settings, prompt = json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(sys.argv[1], backend="jax_tpu", tensor_parallel_size=2, nnodes=2, **settings)
rules = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
print(len(llm.generate([{"prompt_token_ids": prompt}], rules, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_other_hosts_end_when_an_offline_script_on_host_0_ends(folder: Path) -> None:
    port, model = own_port(), folder / "tiny"
    hosts = {"master_addr": OWN_ADDRESS, "master_port": port, "xla_cache_path": str(folder / "xla")}
    words = [sys.executable, "-c", OFFLINE, str(model), json.dumps(SMALL | hosts), json.dumps(PROMPTS[0])]
    with follower(model, *shared_flags(folder, port)) as second:
        script = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=PATIENCE)
        assert (script.returncode, script.stdout.split()[-1]) == (0, "6"), script.stderr
        _, log = second.communicate(timeout=PATIENCE)
        assert second.returncode == 0, log


def test_host_0_names_the_host_that_died(folder: Path) -> None:
    with pair(folder) as (first, second, _):
        os.kill(engine_of(second), signal.SIGKILL)
        assert last_line(first).startswith("pagoda: error: host 1 (127.0.0.1) is gone: ")
        assert "killed by SIGKILL" in last_line(second)
        assert (first.returncode, second.returncode) == (1, 1)


def test_other_hosts_end_when_host_0_dies(folder: Path) -> None:
    with pair(folder) as (first, second, _):
        os.kill(engine_of(first), signal.SIGKILL)
        # JAX may be faster: it ends a process whose coordinator is gone
        assert re.search(rf"host 0 \({re.escape(OWN_ADDRESS)}\) is gone|killed by SIGABRT", last_line(second))
        assert second.returncode == 1


@pytest.mark.setting("--nnodes", "--node-rank", "--master-port", "--headless")
def test_hosts_with_different_settings_are_refused(folder: Path) -> None:
    flags = shared_flags(folder, own_port())
    first_host = served(str(folder / "tiny"), *flags, program=REAL)
    with follower(folder / "tiny", *flags, "--max-num-seqs", "2") as second, first_host as (first, _):
        line = last_line(first)
        assert line == last_line(second)
    differs = "host 1 (127.0.0.1) has --max-num-seqs 2 instead of 1; give every host the same flags"
    assert line == f"pagoda: error: --nnodes: {differs}"
    assert (first.returncode, second.returncode) == (2, 2)


@pytest.mark.setting("--cluster-token-file")
def test_the_token_is_in_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_CLUSTER_TOKEN", raising=False)
    assert cluster_token(ParallelConfig()) == ""
    monkeypatch.setenv("PAGODA_CLUSTER_TOKEN", "a secret of the variable")
    assert cluster_token(ParallelConfig()) == "a secret of the variable"
    file = tmp_path / "token"
    in_file = ParallelConfig(cluster_token_file=str(file))
    for text, words in ((None, "cannot be read: No such file"), (" \n", "is empty"), ("short", "fewer than 16 char")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=f"^--cluster-token-file: .*{words}"):
            cluster_token(in_file)
    file.write_text("a secret of the file\n")
    assert cluster_token(in_file) == "a secret of the file"


def test_mesh_must_use_all_devices() -> None:
    def host(rank: int, devices: int) -> Host:
        kind = {"devices": str(devices), "devices of kind": "V6E"}
        facts = HostFingerprint(rank=rank, nodes=2, versions={}, model={}, settings={}, environment={}, devices=kind)
        return Host(facts, f"10.0.0.{rank}")

    hosts = [host(0, 4), host(1, 4)]
    assert check_devices(hosts, ParallelSizes(4, 2)) == ""
    assert check_devices([host(0, 0), host(1, 0)], ParallelSizes(4)) == ""
    assert check_devices(hosts, ParallelSizes(4)) == (
        "the model is sharded across 4 devices, but there are 8 (host 0 (10.0.0.0) has 4, host 1 (10.0.0.1) has 4); "
        "use all of them: --tensor-parallel-size 8"
    )


def test_shared_settings_exist() -> None:
    assert set(SHARED_SETTINGS) <= set(ENGINE_SETTINGS)


@pytest.mark.setting("--nnodes", "--node-rank", "--master-port", "--headless")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "0"], "--nnodes: 0 is not positive; use 1 or more"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank: 2 is out of range for 2 hosts; use 0 to 1"),
        (["--nnodes", "2", "--master-port", "65535"], "--master-port: 65535 or the following port is invalid"),
        (["--nnodes", "2", "--node-rank", "-1"], "--node-rank: -1 is negative; use 0"),
        (["--nnodes", "2", "--node-rank", "1"], "--node-rank: only host 0 serves HTTP; add --headless"),
        (["--nnodes", "2", "--headless"], "--headless: host 0 serves the requests; drop it, or set"),
        (["--headless"], "--headless: there is no host 0 to follow; set --nnodes and --node-rank, or drop it"),
        (["--nnodes", "2", "--backend", "reference"], "--nnodes: reference runs a model on one host; use 1, or --back"),
        (
            ["--nnodes", "2", "--backend", "jax_tpu", "--compiled-bundle", "x"],
            "--compiled-bundle: a bundle is for one host; drop it",
        ),
    ],
)
def test_invalid_host_settings_are_one_error_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder / "tiny"), "--port", "0", *words]) == 2
    assert f"pagoda: error: {message}" in capsys.readouterr().err


def test_requests_on_another_host_are_refused(folder: Path) -> None:
    args = EngineArgs(str(folder / "tiny"), nnodes=2, node_rank=1)
    with pytest.raises(ConfigError, match=r"^--node-rank: requests go to host 0; on the others run pagoda serve"):
        LLM(str(folder / "tiny"), nnodes=2, node_rank=1)
    with pytest.raises(ConfigError, match=r"^--node-rank: requests go to host 0"):
        AsyncLLM(args.create_engine_config())
