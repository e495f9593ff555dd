"""The effect of process settings, given as environment variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from support.servers.live_server import live_server

from pagoda.backends.reference.model.numerics import thread_count
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.engine import build_engine, pinned, ranges

TESTS = Path(__file__).resolve().parents[3]


@contextmanager
def served(model: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `pagoda serve` with a fake engine; yield the process and its port when it is ready."""
    path = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
    words = [sys.executable, str(TESTS / "support" / "servers" / "fake_serve.py"), model, "--port", "0"]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=os.environ | environ | {"PYTHONPATH": path}
    )
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        said = ""
        while "ready after" not in said:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        port = re.search(r"listening on http://[\d.]+:(\d+)", said)
        assert port is not None
        yield process, int(port[1])
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


def ask(port: int, method: str, path: str, body: object = None) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.command("serve")
@pytest.mark.setting("--keep-alive-on-engine-death")
@pytest.mark.variable("PAGODA_KEEP_ALIVE_ON_ENGINE_DEATH")
def test_keep_alive_on_engine_death() -> None:
    with served("fake:exit", VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as (process, port):
        request = {"model": "fake:exit", "prompt": "a", "max_tokens": 9}
        assert ask(port, "POST", "/v1/completions", request) >= 500
        assert process.stderr is not None
        while "the engine died" not in (line := process.stderr.readline()):
            assert line, "it ended with its engine"
        assert "exit status 7" in line
        assert ask(port, "GET", "/health") == 503
        assert ask(port, "POST", "/v1/completions", request) >= 500
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.setting("--log-stats-interval")
@pytest.mark.variable("PAGODA_LOG_STATS_INTERVAL")
def test_log_stats_interval() -> None:
    with served("fake:slow", VLLM_LOG_BATCHSIZE_INTERVAL="0.05") as (process, port):
        assert ask(port, "POST", "/v1/completions", {"model": "fake:slow", "prompt": "a", "max_tokens": 50}) == 200
        assert process.stderr is not None
        while "Avg prompt throughput" not in (line := process.stderr.readline()):
            assert line, "it ended without statistics"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_invalid_log_stats_interval_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match="--log-stats-interval"):
        EngineArgs(log_stats_interval=float(seconds)).create_engine_config()


@pytest.mark.setting("--server-dev-mode")
@pytest.mark.variable("PAGODA_SERVER_DEV_MODE")
def test_development_mode() -> None:
    with live_server(server_dev_mode=True) as server:
        request = {"model": "fake", "prompt": "abcdefghijkl", "max_tokens": 1}
        hits = []
        for reset in (False, False, True):
            if reset:
                assert server.post("/reset_prefix_cache", {}) == (200, {"success": True})
            assert server.post("/v1/completions", request)[0] == 200
            hits.append(server.llm.stats.prefix_hits)
        assert hits[0] == 0
        assert hits[1] > 0
        assert hits[2] == hits[1]  # no further hit
    with live_server() as server:
        assert server.post("/reset_prefix_cache", {})[0] == 404


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32},
        **{"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.setting("--cpu-omp-threads-bind")
@pytest.mark.variable("PAGODA_CPU_OMP_THREADS_BIND")
def test_steps_run_on_the_pinned_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(max(before)))
    args = EngineArgs(folder, load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks_override=16)
    built = build_engine(args.create_engine_config(), "llm")
    allowed = built.backend._worker.submit(os.sched_getaffinity, 0).result()  # type: ignore[attr-defined]
    built.backend.close()
    assert allowed == {max(before)}
    assert os.sched_getaffinity(0) == before


def test_unavailable_cores_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match="core 4095 is not available to this process; choose from "),
        pinned(frozenset({4095})),
    ):
        pass
    assert ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    for word in ("auto", "all", "nobind"):
        assert EngineArgs(cpu_omp_threads_bind=word).create_engine_config().runtime.cores is None


@pytest.mark.variable("OMP_NUM_THREADS")
def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 777)  # what the runtime makes of the variable
    monkeypatch.setenv("OMP_NUM_THREADS", "777")
    assert thread_count() == 777
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_count() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("setting", "value"), [("rpc_timeout", 1000), ("engine_iteration_timeout_s", 0.0)])
def test_invalid_timeouts_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match="--" + setting.replace("_", "-")):
        EngineArgs(**{setting: value}).create_engine_config()
