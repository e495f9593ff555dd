"""HEAD wherever GET is, and paths with a slash at their end."""

import logging
from collections.abc import Iterator

import pytest
from support.servers.live_server import LiveServer, live_server

PREFIX = "/models/small"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(root_path=PREFIX) as server:
        yield server


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/ping", "/version", "/load", "/v1/models", "/v1/models/fake", "/docs", "/redoc"]
)
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_head_is_get_without_a_body(server: LiveServer, path: str, prefix: str) -> None:
    get, head = server.response("GET", prefix + path), server.response("HEAD", prefix + path)
    assert (get.status, head.status, head.body) == (200, 200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers.get(name) == get.headers.get(name)


def test_a_connection_is_used_again_after_head(server: LiveServer) -> None:
    with server.raw("HEAD", "/v1/models", {}) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_head_of_a_path_without_get(server: LiveServer) -> None:
    assert server.response("HEAD", "/v1/completions").status == 405
    assert server.response("HEAD", "/nothing").status == 404


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_a_slash_at_the_end_changes_nothing(server: LiveServer, prefix: str) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    status, answer = server.post(prefix + "/v1/completions/", body)
    assert (status, answer["choices"][0]["text"]) == (200, "bc")
    assert server.get(prefix + "/version/") == server.get("/version")
    assert server.get(prefix + "/v1/models/fake/?x=1/")[1]["id"] == "fake"
    assert server.get(prefix + "/version//")[0] == 404
    assert server.get(prefix + "/v1/nothing/")[0] == 404


def test_a_slash_does_not_open_a_path() -> None:
    with live_server(api_key=("k",)) as server:
        assert server.get("/v1/models/")[0] == 401
        assert server.response("HEAD", "/v1/models").status == 401
        assert server.get("/v1/models/", authorization="Bearer k")[0] == 200


def test_a_server_that_has_ended_filters_no_logs() -> None:
    loggers = [logging.getLogger(name) for name in ("uvicorn.access", "uvicorn.error")]
    before = [len(logger.filters) for logger in loggers]
    with live_server():
        assert [len(logger.filters) for logger in loggers] == [count + 1 for count in before]
    assert [len(logger.filters) for logger in loggers] == before
