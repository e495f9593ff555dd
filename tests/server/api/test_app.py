"""The application over a real socket: errors, keys, health, limits, disconnects, engine failures."""

import json
import logging
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from support.servers.chat_messages import message as empty_message
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.watching import eventually

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TEXT = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=20_000) as server:
        yield server


@pytest.fixture
def slow() -> Iterator[LiveServer]:
    with live_server("fake:slow", engine={"max_num_seqs": 2}) as server:
        yield server


def serves(server: LiveServer) -> None:
    status, answer = server.post("/v1/completions", TEXT)
    assert (status, answer["choices"][0]["text"]) == (200, "bc")


BAD: list[tuple[str, Any, int, str | None]] = [
    ("/v1/completions", b"{", 400, None),
    ("/v1/completions", b"", 400, None),
    ("/v1/completions", b"[1, 2]", 400, None),
    ("/v1/completions", {"model": "fake"}, 400, "prompt"),
    ("/v1/completions", TEXT | {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", TEXT | {"prompt": "a" * 100}, 400, "prompt"),
    ("/v1/completions", TEXT | {"prompt": [1, 300]}, 400, "prompt"),
    ("/v1/completions", TEXT | {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", TEXT | {"prompt": [10**30]}, 400, "prompt"),
    ("/v1/completions", TEXT | {"temperature": -1.0}, 400, "temperature"),
    ("/v1/completions", TEXT | {"temperature": float("nan")}, 400, "temperature"),
    ("/v1/completions", TEXT | {"top_p": 0.0}, 400, "top_p"),
    ("/v1/completions", TEXT | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", TEXT | {"n": 0}, 400, "n"),
    ("/v1/completions", TEXT | {"n": 10**9}, 400, "n"),
    ("/v1/completions", TEXT | {"logprobs": 100}, 400, "logprobs"),
    ("/v1/completions", TEXT | {"logit_bias": {"999": 1.0}}, 400, "logit_bias.999"),
    ("/v1/completions", TEXT | {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ("/v1/completions", TEXT | {"priority": 1}, 400, "priority"),
    ("/v1/completions", TEXT | {"model": "other"}, 404, "model"),
    ("/v1/completions", TEXT | {"stream": True, "prompt": "a" * 100}, 400, "prompt"),
    ("/v1/completions", TEXT | {"request_id": "x" * 257}, 400, "request_id"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    (
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ("/v1/completions", TEXT | {"prompt": ["a", "a" * 100]}, 400, "prompt[1]"),
    ("/v1/completions", TEXT | {"stop_token_ids": [1, -1]}, 400, "stop_token_ids[1]"),
    ("/v1/chat/completions", CHAT | {"tools": [{}]}, 400, "tools[0].type"),
    ("/v1/chat/completions", CHAT | {"chat_template": "x"}, 400, "chat_template"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 99, "logprobs": True}, 400, "top_logprobs"),
    ("/v1/completions", TEXT | {"prompt": "a" * 30_000}, 413, None),
    ("/v1/nothing", TEXT, 404, None),
    ("/v1/completions//", TEXT, 404, None),
    ("/v1/models", TEXT, 405, None),
]


@each_row(("path", "body", "status", "param"), BAD)
def test_bad_requests_are_refused_and_the_next_is_served(
    server: LiveServer, path: str, body: Any, status: int, param: str | None
) -> None:
    got, answer = server.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    codes = {"does not exist": "model_not_found", "maximum context length": "context_length_exceeded"}
    assert error["code"] == next((code for words, code in codes.items() if words in error["message"]), None)
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in json.dumps(answer)
    assert ".py" not in json.dumps(answer)
    serves(server)


def test_content_type_must_be_json(server: LiveServer) -> None:
    status, _ = server.request("POST", "/v1/completions", b"{}", {"content-type": "text/plain"})
    assert status == 415


def test_a_connection_is_kept_after_a_refusal(server: LiveServer) -> None:
    """An unhandled error would close the connection after its response."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    statuses, sockets = [], set()
    for method, path in (("POST", "/v1/images/edits"), ("GET", "/health"), ("GET", "/nothing")):
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        sockets.add(connection.sock)
    connection.close()
    assert statuses == [501, 200, 404]
    assert len(sockets) == 1


def test_a_chunked_body_is_limited(server: LiveServer) -> None:
    status, _ = server.request("POST", "/v1/completions", b"", {"content-type": "application/json"})
    assert status == 400
    chunked = b"".join(b"1000\r\n" + b"a" * 0x1000 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunked)
        assert b"413" in raw.recv(1000).split(b"\r\n")[0]


def test_version_health_ready_metrics(server: LiveServer) -> None:
    assert server.get("/health") == (200, b"")
    assert server.get("/ready")[0] == 200
    assert server.get("/ping")[0] == server.post("/ping", {})[0] == 200
    assert server.get("/version")[1]["version"]
    status, text = server.get("/metrics")
    assert status == 200
    assert b"vllm:num_requests_running" in text


def test_openapi_lists_the_routes(server: LiveServer) -> None:
    status, schema = server.get("/openapi.json")
    assert status == 200
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "top_k"} <= set(fields)


def test_before_the_model_is_loaded() -> None:
    with live_server(ready=False) as server:
        for path in ("/health", "/ready"):
            status, answer = server.get(path)
            assert status == 503
            assert "loading" in answer["error"]["message"]
        assert server.post("/v1/completions", TEXT)[0] == 503
        assert server.get("/metrics")[0] == 200
        server.call(server.state.wait_until_ready())
        assert server.get("/ready")[0] == 200
        serves(server)


KEYS = {"api_key": ("one", "two")}


@pytest.mark.parametrize("config", [KEYS, KEYS | {"root_path": "/proxy"}])
def test_api_keys(config: dict[str, Any]) -> None:
    with live_server(**config) as server:
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert server.get(path)[0] == 200
        for path in (
            "/v1/models",
            "//v1/models",
            "/V1/models",
            "/v1/models/",
            "/health/../v1/models",
            "/health//",
            "//health",
            "/openapi.json",
            "/nothing",
            "/%2fhealth",
        ):
            status, answer = server.get(path)
            assert status == 401, path
            assert (answer["error"]["type"], answer["error"]["code"]) == ("invalid_request_error", "invalid_api_key")
        for header in ("Bearer wrong", "Bearer ", "one", "Basic one", "Bearer one two", "Bearer \xff"):
            assert server.get("/v1/models", authorization=header)[0] == 401
        for key in ("one", "two"):
            assert server.get("/v1/models", authorization=f"Bearer {key}")[0] == 200
            assert server.get("/v1/models", authorization=f"bearer {key}")[0] == 200
        assert server.post("/v1/completions", TEXT)[0] == 401


def test_a_preflight_needs_no_key() -> None:
    with live_server(**KEYS) as server:
        headers = {"origin": "http://a", "access-control-request-method": "POST"}
        assert server.request("OPTIONS", "/v1/models", None, headers)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "body", [{"max_tokens": 40}, {"max_tokens": 40, "n": 3}, {"prompt": ["a"] * 5, "max_tokens": 40}]
)
def test_a_disconnect_frees_blocks(slow: LiveServer, stream: bool, body: dict[str, Any]) -> None:
    connection = slow.raw("POST", "/v1/completions", {"prompt": "a", "stream": stream, "ignore_eos": True} | body)
    eventually(lambda: slow.llm.stats.kv_blocks_used > 0)
    connection.close()
    eventually(lambda: not slow.llm.num_unfinished)
    eventually(lambda: slow.llm.stats.kv_blocks_used == 0 and slow.llm.stats.running == 0)
    assert slow.state.running == 0
    assert slow.llm.stats.waiting == 0


def test_draining_refuses_and_finishes(slow: LiveServer) -> None:
    connection = slow.raw("POST", "/v1/completions", {"prompt": "a", "max_tokens": 60, "stream": True})
    answer = connection.recv(65536)
    slow.call(slow.state.drain())  # a timeout of 0: whatever runs is ended
    while part := connection.recv(65536):
        answer += part
        if b"[DONE]" in answer:
            break
    assert b"shutting down" in answer
    assert slow.get("/ready")[0] == 503
    assert slow.get("/health")[0] == 200
    assert slow.post("/v1/completions", TEXT)[0] == 503
    batch = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert slow.post("/v1/batches", batch)[0] == 503
    eventually(lambda: slow.llm.stats.running == 0)


def test_draining_waits_for_running_requests() -> None:
    with live_server("fake:slow", shutdown_timeout=20.0) as server:
        connection = server.raw("POST", "/v1/completions", {"prompt": "a", "max_tokens": 20})
        eventually(lambda: server.state.running == 1)
        server.call(server.state.drain())
        answer = connection.recv(65536)
        while b"finish_reason" not in answer:  # head and body may come apart
            answer += connection.recv(65536) or pytest.fail("the connection was closed")
        assert b'"finish_reason":"length"' in answer


@pytest.mark.parametrize("stream", [True, False])
def test_a_dying_engine_fails_requests_with_the_cause(stream: bool) -> None:
    with live_server("fake:crash") as server:
        status, answer = server.post("/v1/completions", TEXT | {"max_tokens": 20, "stream": stream})
        text = answer.decode() if stream else json.dumps(answer)
        assert "the engine has ended" in text
        assert status == (200 if stream else 500)
        if stream:
            assert text.rstrip().endswith("data: [DONE]")
        status, answer = server.post("/v1/completions", TEXT)
        assert status == 500
        assert "the engine has ended" in answer["error"]["message"]
        status, answer = server.get("/health")
        assert status == 503
        assert "the device is gone" in answer["error"]["message"]


def test_internal_errors_are_not_disclosed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(server.state, "model_name", bug)
    status, answer = server.post("/v1/completions", TEXT)
    assert status == 500
    assert answer["error"]["message"].startswith("internal error")
    monkeypatch.undo()
    serves(server)


@pytest.mark.field("CompletionRequest.user")
def test_enable_log_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagoda")
    with live_server(engine={"enable_log_requests": True}, max_log_len=40) as server:
        logging.getLogger("pagoda").addHandler(caplog.handler)
        try:
            server.post("/v1/completions", TEXT | {"prompt": "b" * 50, "user": "me"})
        finally:
            logging.getLogger("pagoda").removeHandler(caplog.handler)
    assert "b" * 20 in caplog.text
    assert "b" * 50 not in caplog.text
    assert "user 'me'" in caplog.text


def test_without_a_tokenizer() -> None:
    with live_server(engine={"skip_tokenizer_init": True}) as server:
        status, answer = server.post("/v1/completions", {"prompt": [97], "max_tokens": 2, "return_token_ids": True})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == [98, 99]
        assert server.post("/v1/completions", TEXT)[1]["error"]["param"] == "prompt"
        assert server.post("/v1/chat/completions", CHAT)[1]["error"]["param"] == "messages"


@pytest.mark.field("ChatCompletionRequest.chat_template")
def test_templates_from_flags_and_requests() -> None:
    flags = {"chat_template": "{{ messages[0].content }}", "trust_request_chat_template": True, "response_role": "bot"}
    with live_server(**flags) as server:
        _, answer = server.post("/v1/chat/completions", CHAT)
        assert answer["choices"][0]["message"] == empty_message("bc", role="bot")
        _, answer = server.post("/v1/chat/completions", CHAT | {"chat_template": "x"})
        assert answer["choices"][0]["message"]["content"] == "yz"
