"""The command line: flags, errors in one line, and the life and death of `serve`."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from support.servers.live_server import live_server
from support.servers.served import environment, served, wait_ready

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.cli import main
from pagoda.server.cli.client.http_client import ApiClient, ApiError
from pagoda.server.cli.serving import serve
from pagoda.server.http.server import http_server


def parsed(*words: str) -> argparse.Namespace:
    return main.parser_of("serve", main.COMMANDS["serve"]).parse_args(words)


def test_help_and_version_import_nothing_heavy() -> None:
    check = (
        "import sys; from pagoda.server.cli.main import main; main(['--help']); main(['--version']);"
        "heavy = {'torch', 'fastapi', 'pydantic', 'numpy', 'tokenizers', 'zmq'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "collect-env" in done.stdout


def test_unknown_commands_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serv"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert main.main(["bench", "latncy"]) == 2
    assert "did you mean latency?" in capsys.readouterr().err
    assert main.main([]) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--max-modle-len", "5"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["--prot=5"], "unknown flag --prot; did you mean --port?"),
        (["a", "b"], "unknown argument b"),
        (["-tpp", "2"], "unknown flag -tpp; did you mean -tp?"),
        (["--port"], "argument --port: expected one argument"),
        (["--port.x", "1"], "--port is not a JSON setting and has no key x; use --port VALUE"),
    ],
)
def test_flag_errors_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["serve", *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"pagoda serve: error: {line}\n"


def test_serve_flags() -> None:
    engine, server = serve.configurations(
        parsed("some/model", "--max_model_len", "2k", "--api-key", "a", "b", "--api-key", "c", "--port", "0")
    )
    assert (engine.model.model, engine.model.max_model_len) == ("some/model", 2000)
    assert server.api_key == ("a", "b", "c")
    assert server.port == 0
    engine, server = serve.configurations(parsed("--model", "m", "--enable-log-requests", "--allowed-origins", '["x"]'))
    assert engine.model.model == "m"
    assert engine.observability.enable_log_requests
    assert server.allowed_origins == ("x",)


def test_every_server_flag_reaches_its_field() -> None:
    assert serve.configurations(parsed())[1] == ServerConfig()


def test_model_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model"):
        serve.configurations(parsed("one", "--model", "two"))


@pytest.mark.variable("PAGODA_API_KEY")
@pytest.mark.parametrize("name", ["PAGODA_API_KEY", "VLLM_API_KEY"])
def test_api_key_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "secret")
    assert serve.configurations(parsed())[1].api_key == ("secret",)
    assert serve.configurations(parsed("--api-key", "mine"))[1].api_key == ("mine",)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("port", 70000, "--port"),
        ("api_key", ("",), "--api-key"),
        ("ssl_keyfile", "k", "--ssl-certfile"),
        ("ssl_cert_reqs", 3, "--ssl-cert-reqs"),
        ("shutdown_timeout", float("nan"), "--shutdown-timeout"),
        ("max_body_bytes", 0, "--max-body-bytes"),
        ("max_log_len", -1, "--max-log-len"),
        ("root_path", "x", "--root-path"),
    ],
)
def test_bad_server_settings(field: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**{field: value})
    assert error.value.setting == flag


def test_busy_port_and_invalid_host_are_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port: cannot listen"):
            serve.bind(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="--host"):
        serve.bind(ServerConfig(host="host.invalid"))
    with pytest.raises(ConfigError, match="--uds"):
        serve.bind(ServerConfig(uds="/nonexistent/folder/socket"))


def test_a_unix_socket_and_a_stale_one(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with live_server(uds=path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in client.recv(1000)
        with pytest.raises(ConfigError, match="--uds"):
            serve.bind(ServerConfig(uds=path))


def test_invalid_certificates_are_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for path in (str(tmp_path / "x"), str(tmp_path / "nothing")):
        with pytest.raises(ConfigError, match=r"--ssl-(certfile|keyfile)"):
            http_server(FastAPI(), ServerConfig(ssl_keyfile=path, ssl_certfile=path))


def test_invalid_chat_template_is_refused() -> None:
    from pagoda.common.text.chat_template import read_chat_template

    with pytest.raises(ConfigError, match="--chat-template"):
        read_chat_template("/no/such/file")
    assert read_chat_template("{{ x }}") == "{{ x }}"
    assert "<tool_call>" in (read_chat_template("chatml_tools") or "")


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_API_KEY", "secret")
    assert main.main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for part in ("[system]", "[packages]", "numpy", "[backends]", "reference"):
        assert part in text
    assert "secret" not in text


@pytest.mark.command("serve")
def test_signal_shuts_the_server_down() -> None:
    with served("fake", "--served-model-name", "m") as (process, url):
        wait_ready(process)
        client = ApiClient(f"{url}/v1")
        assert client.models() == ["m"]
        said = [
            event["choices"][0]["text"] for event in client.stream("/completions", {"prompt": "a", "max_tokens": 3})
        ]
        assert "".join(said) == "bcd"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_signal_to_the_process_group_lets_requests_finish() -> None:
    """As service managers stop a service."""
    with served("fake:slow", "--served-model-name", "m", "--shutdown-timeout", "600") as (process, url):
        wait_ready(process)
        events = ApiClient(f"{url}/v1").stream("/completions", {"prompt": "a", "max_tokens": 12})
        said = next(events)["choices"][0]["text"]
        os.killpg(process.pid, signal.SIGTERM)
        said += "".join(event["choices"][0]["text"] for event in events)
        assert said == "bcdefghijklm"
        assert process.wait(60) == 0


def test_server_exits_with_an_error_when_the_engine_dies() -> None:
    with served("fake:exit") as (process, url):
        wait_ready(process)
        with pytest.raises(ApiError, match="the engine has ended"):
            list(ApiClient(f"{url}/v1").stream("/completions", {"model": "fake:exit", "prompt": "a"}))
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read().rstrip().splitlines()[-1].startswith("pagoda: error: ")


@pytest.mark.parametrize(
    ("model", "line", "status"), [("fake:config", "--dtype: not today; use another", 2), ("fake:bug", "KeyError", 1)]
)
def test_startup_error_of_the_engine_is_one_error_line(model: str, line: str, status: int) -> None:
    with served(model) as (process, _):
        assert process.stderr is not None
        lines = process.stderr.read().rstrip().splitlines()
        assert process.wait(60) == status
    assert lines[-1].startswith("pagoda: error: ")
    assert line in lines[-1]


def test_signal_while_the_engine_loads() -> None:
    with served("fake") as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
