"""Clients that send too much, too slowly or nothing: each is refused, and the next is served."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.engines.fake_engine import allow
from support.servers.live_server import LiveServer, live_server
from support.servers.served import served, wait_ready
from support.suite.watching import PATIENCE, eventually, logged

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.http import connections
from pagoda.server.http.connections import LINGER_SECONDS, MAX_PIPELINED, MIN_BODY_RATE, RESERVE

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
HEAD = 2_000
LATE = 600.0
"""Seconds of each timeout: none passes unless a test puts the server's clock forward."""

QUICK: dict[str, Any] = {
    "h11_max_incomplete_event_size": HEAD,
    "h11_max_header_count": 20,
    "timeout_headers": LATE,
    "timeout_body": LATE,
    "timeout_keep_alive": LATE,
    "max_connections": 20,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(**QUICK) as server:
        yield server


@pytest.fixture(scope="module")
def endless() -> Iterator[LiveServer]:
    with live_server("fake:endless", **QUICK) as server:
        yield server


def connected(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def sent(client: socket.socket, data: bytes) -> bool:
    """Return whether all data could be sent."""
    try:
        client.sendall(data)
    except OSError:
        return False
    return True


def answer(client: socket.socket, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """Return the bytes received until the connection ends or `until` is true of them."""
    received = b""
    with suppress(ConnectionError):
        while not until(received) and (part := client.recv(65536)):
            received += part
    return received


def refused(server: LiveServer, client: socket.socket, status: int, word: str) -> None:
    """Read the refusal and the end of the connection, which comes once the client has had time to read it."""
    head, _, body = answer(client, lambda received: b"}}" in received).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert word in error["message"]
    server.advance(LINGER_SECONDS)
    assert answer(client) == b""


def serves(server: LiveServer) -> None:
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    eventually(lambda: not server._server.server_state.connections)


# --- heads ---


@pytest.mark.setting("--h11-max-incomplete-event-size")
@pytest.mark.parametrize(
    "head",
    [
        GET + b"x-a: " + b"a" * HEAD,
        GET + b"x-a: " + b"a" * HEAD + b"\r\n\r\n",
        GET + b"".join(b"x-%d: %b\r\n" % (n, b"a" * 300) for n in range(8)) + b"\r\n",
        b"GET /" + b"a" * HEAD,
        b"GET /" + b"a" * HEAD + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"a" * HEAD,
        POST + b"content-length: 2\r\nx-a: " + b"a" * HEAD + b"\r\n\r\n{}",
        CHUNKED + b"1\r\n{\r\n0\r\nx-a: " + b"a" * 70_000,
        CHUNKED + b"1;" + b"a" * 70_000,
    ],
)
def test_a_large_head_is_refused(server: LiveServer, head: bytes) -> None:
    with closing(connected(server)) as client:
        for start in range(0, len(head), 700):  # in pieces, as it comes
            if not sent(client, head[start : start + 700]):
                break
            server.settle()
        refused(server, client, 431, "--h11-max-incomplete-event-size")
    serves(server)


def test_a_head_of_the_maximum_size_is_accepted(server: LiveServer) -> None:
    head = GET + b"x-a: "
    with closing(connected(server)) as client:
        client.sendall(head + b"a" * (HEAD - len(head) - 20) + b"\r\nconnection: close\r\n\r\n"[-4:])
        assert answer(client, lambda received: b"}" in received).startswith(b"HTTP/1.1 200")


@pytest.mark.setting("--h11-max-header-count")
@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_many_headers_are_refused(server: LiveServer, end: bytes) -> None:
    with closing(connected(server)) as client:
        client.sendall(GET + b"a: b\r\n" * 21 + end)
        refused(server, client, 431, "--h11-max-header-count")
    with closing(connected(server)) as client:
        client.sendall(CHUNKED + b"1\r\n{\r\n0\r\n" + b"a: b\r\n" * 20)
        refused(server, client, 431, "--h11-max-header-count")
    serves(server)


def test_refused_heads_use_little_memory(server: LiveServer) -> None:
    head = GET + b"x-a: " + b"a" * (8 << 20)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(server))) for _ in range(15)]
        tracemalloc.start()
        try:
            for client in clients:
                sent(client, head)
            assert tracemalloc.get_traced_memory()[1] < len(head)
        finally:
            tracemalloc.stop()
    serves(server)


def test_invalid_http_is_refused(server: LiveServer) -> None:
    with closing(connected(server)) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        refused(server, client, 400, "HTTP")
    serves(server)


# --- time ---


@pytest.mark.setting("--timeout-headers")
@pytest.mark.parametrize("start", [b"", b"\r\n", b"G", GET, GET + b"x-a: a\r\n"])
def test_a_late_head_is_refused(server: LiveServer, start: bytes) -> None:
    with closing(connected(server)) as client:
        client.sendall(start)
        eventually(lambda: server._server.server_state.connections)
        server.advance(LATE)
        if start.strip():
            refused(server, client, 408, "--timeout-headers")
        else:
            server.advance(LINGER_SECONDS)
            assert answer(client)[:12] in (b"", b"HTTP/1.1 408")
    serves(server)


def test_a_slow_head_is_refused(server: LiveServer) -> None:
    with closing(connected(server)) as client:
        client.sendall(GET)
        eventually(lambda: server._server.server_state.connections)
        for _ in range(6):
            assert sent(client, b"x: a\r\n"[:3])
            server.advance(LATE / 6)
        refused(server, client, 408, "--timeout-headers")
    serves(server)


@pytest.mark.setting("--timeout-keep-alive")
@pytest.mark.variable("PAGODA_HTTP_TIMEOUT_KEEP_ALIVE")
def test_an_idle_connection_is_closed(server: LiveServer) -> None:
    with closing(connected(server)) as client:
        for _ in range(2):
            client.sendall(GET + b"\r\n")
            assert answer(client, lambda received: b"}" in received).startswith(b"HTTP/1.1 200")
            server.advance(LATE / 2)
        server.advance(LATE / 2)
        assert answer(client) == b""
    with closing(connected(server)) as client:  # and one whose next request stops short
        client.sendall(GET + b"\r\n")
        answer(client, lambda received: b"}" in received)
        client.sendall(GET)
        server.advance(LATE)
        refused(server, client, 408, "--timeout-headers")
    serves(server)


@pytest.mark.setting("--timeout-body")
@pytest.mark.parametrize("start", [POST + b"content-length: 900\r\n\r\n", CHUNKED])
@pytest.mark.parametrize("body", [b"", b"5\r\n{    \r\n"])
def test_a_stalled_body_is_refused(server: LiveServer, start: bytes, body: bytes) -> None:
    with closing(connected(server)) as client:
        client.sendall(start + body)
        eventually(lambda: server._server.server_state.connections)
        server.advance(LATE)
        refused(server, client, 408, "stalled")
    serves(server)
    eventually(lambda: not server.state.running)


def test_a_slow_body_is_refused(server: LiveServer) -> None:
    with closing(connected(server)) as client:
        client.sendall(POST + b"content-length: 100000\r\n\r\n")
        eventually(lambda: server._server.server_state.connections)
        for _ in range(12):  # never stalled, but at the second look, or the first, there are a dozen bytes
            if select.select([client], [], [], 0)[0]:
                break
            assert sent(client, b" ")
            server.advance(LATE / 6)
        refused(server, client, 408, "bytes per second")
    serves(server)


def test_a_slow_body_above_the_minimum_rate_is_accepted(server: LiveServer) -> None:
    each, pieces = int(LATE / 6) * 2 * MIN_BODY_RATE, 15
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode().ljust(each * pieces)
    with closing(connected(server)) as client:
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), each):
            client.sendall(body[start : start + each])
            server.advance(LATE / 6)
        assert answer(client, lambda received: b"}}" in received).startswith(b"HTTP/1.1 200")


def test_a_long_response_has_no_timeout(tmp_path: Path) -> None:
    payload = json.dumps({"prompt": "a", "max_tokens": 60, "stream": True}).encode()
    allow(tmp_path / "tokens", 8)
    with live_server(f"fake:held@{tmp_path}/tokens", **QUICK) as server, closing(connected(server)) as client:
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(payload) + payload + b"\r\n")  # as old clients do
        answer(client, lambda received: b"data:" in received)
        for _ in range(3):
            server.advance(LATE)
        allow(tmp_path / "tokens", 1000)
        assert b"[DONE]" in answer(client, lambda received: b"[DONE]" in received)


def test_a_client_that_does_not_read_is_disconnected(endless: LiveServer) -> None:
    payload = json.dumps({"prompt": "a", "max_tokens": 60_000, "stream": True, "ignore_eos": True}).encode()
    with closing(connected(endless)) as client:
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(payload) + payload)
        answer(client, lambda received: b"data:" in received)

        async def fill() -> None:
            for each in endless._server.server_state.connections:
                each.pause_writing()  # as the transport does when its buffer is full

        endless.call(fill())
        endless.advance(connections.UNREAD_SECONDS)
        answer(client)  # ends
    eventually(lambda: endless.state.running == 0 and not endless.llm.num_unfinished)
    serves(endless)


# --- early answers ---


def test_a_request_without_key_is_refused_before_its_body() -> None:
    with live_server(api_key=("k",), **QUICK) as server:
        for start in (
            POST + b"content-length: 30000000\r\n\r\n",
            CHUNKED,
            POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n",
        ):
            with closing(connected(server)) as client:
                client.sendall(start)
                received = answer(client, lambda received: b"}}" in received)
                assert received.startswith(b"HTTP/1.1 401")
                server.advance(LINGER_SECONDS)
                eventually(lambda: not sent(client, b"5\r\nabcde\r\n"))  # it is not read for ever
        eventually(lambda: not server._server.server_state.connections)


def test_a_connection_is_kept_after_an_early_response() -> None:
    with live_server(api_key=("k",), **QUICK) as server, closing(connected(server)) as client:
        client.sendall(POST + b"content-length: 9\r\n\r\n12345")
        assert answer(client, lambda received: b"}}" in received).startswith(b"HTTP/1.1 401")
        client.sendall(b"6789" + GET + b"\r\n")
        assert answer(client, lambda received: b"}" in received).startswith(b"HTTP/1.1 200")


def test_a_chunked_body_is_limited_while_read() -> None:
    with live_server(max_body_bytes=1000, **QUICK) as server, closing(connected(server)) as client:
        client.sendall(CHUNKED + b"400\r\n" + b" " * 1024 + b"\r\n")
        received = answer(client, lambda received: b"}}" in received)
        assert received.startswith(b"HTTP/1.1 413")
        assert b"--max-body-bytes" in received


# --- many ---


@pytest.mark.setting("--max-connections")
def test_a_new_connection_replaces_the_one_that_has_waited_longest() -> None:
    count = 20
    with live_server(max_connections=count, timeout_headers=LATE) as server, ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(server))) for _ in range(count)]
        clients[1].sendall(GET)  # half a head is no reason to stay
        eventually(lambda: len(server._server.server_state.connections) == count)
        for waiting in clients[:3]:
            client = stack.enter_context(closing(connected(server)))
            client.sendall(GET + b"\r\n")
            assert answer(client, lambda received: b"}" in received).startswith(b"HTTP/1.1 200")
            assert answer(waiting) == b""  # closed
            assert len(server._server.server_state.connections) <= count
        clients[5].sendall(GET + b"\r\n")
        assert answer(clients[5], lambda received: b"}" in received).startswith(b"HTTP/1.1 200")


def test_connections_that_come_at_once_are_counted_once() -> None:
    count = 200
    with live_server(max_connections=count, timeout_headers=LATE) as server, ExitStack() as stack:
        all_wait = threading.Event()
        server._loop.call_soon_threadsafe(all_wait.wait, PATIENCE)
        for _ in range(count):
            stack.enter_context(closing(connected(server)))
        all_wait.set()
        eventually(lambda: len(server._server.server_state.connections) == count)


def test_while_all_connections_are_busy_only_probes_are_answered(tmp_path: Path) -> None:
    payload = json.dumps({"prompt": "a", "max_tokens": 60}).encode()
    busy = POST + b"content-length: %d\r\n\r\n" % len(payload) + payload
    allow(tmp_path / "tokens", 8)
    with live_server(f"fake:held@{tmp_path}/tokens", max_connections=3) as server, ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(server))) for _ in range(3)]
        for client in clients:
            client.sendall(busy)
        eventually(lambda: server.state.running == 3)
        with closing(connected(server)) as client:
            client.sendall(busy)
            refused(server, client, 503, "--max-connections")
        with closing(connected(server)) as client:
            client.sendall(b"GET /health?x=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer(client).startswith(b"HTTP/1.1 200")  # and is closed
        extra = [stack.enter_context(closing(connected(server))) for _ in range(40)]
        eventually(lambda: sum(not answered(each) for each in extra) >= 20)  # 20 wait, the others are closed
        assert len(server._server.server_state.connections) <= 3 + RESERVE
        allow(tmp_path / "tokens", 1000)
        for client in clients:
            assert b"HTTP/1.1 200" in answer(client, lambda received: received.endswith(b"}"))
    assert RESERVE < 20


def answered(client: socket.socket) -> bool:
    """Return whether the connection is still open without an answer."""
    client.settimeout(0.01)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_probes_are_answered_when_no_descriptors_are_left() -> None:
    with served("fake", "--timeout-headers", "3600") as (process, url):
        port = int(url.rpartition(":")[2])
        lines: list[str] = []
        wait_ready(process)
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        left = 10 + RESERVE
        used = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 10, used + 10))
        with ExitStack() as stack:
            for _ in range(4 * left):
                client = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)))
                client.sendall(GET)
                with closing(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)) as probe:
                    probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert answer(probe, lambda received: b"\r\n\r\n" in received).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert process.wait(PATIENCE) == 0
        reader.join(PATIENCE)
    shortages = [line for line in lines if "ulimit -n" in line]
    assert 1 <= len(shortages) <= left, lines[-20:]  # one in LOG_SECONDS, not one for each connection


def test_invalid_requests_do_not_fill_the_log(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "pagoda"), logged(caplog, "uvicorn.error"):
        for _ in range(50):
            with closing(connected(server)) as client:
                client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
                assert answer(client, lambda received: b"}}" in received).startswith(b"HTTP/1.1 400")
    assert sum("Invalid HTTP" in record.getMessage() for record in caplog.records) <= 10  # one in LOG_SECONDS


def test_pipelined_requests_are_limited(endless: LiveServer) -> None:
    payload = json.dumps({"prompt": "a", "max_tokens": 60}).encode()
    first = POST + b"content-length: %d\r\n\r\n" % len(payload) + payload
    with closing(connected(endless)) as client:
        client.sendall(first + (GET + b"\r\n") * (MAX_PIPELINED + 2))
        assert answer(client).count(b"HTTP/1.1 200") == 0
    with closing(connected(endless)) as client:
        client.sendall(first + (GET + b"\r\n") * 5)
        received = answer(client, lambda received: received.count(b"HTTP/1.1 200") == 6)
        endless.advance(LATE)
        assert (received + answer(client)).count(b"HTTP/1.1 200") == 6
    serves(endless)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_headers", 0.0),
        ("timeout_body", float("nan")),
        ("timeout_keep_alive", float("inf")),
        ("max_connections", 0),
        ("h11_max_incomplete_event_size", 0),
        ("h11_max_header_count", -1),
    ],
)
def test_invalid_limits(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ServerConfig(**{name: value})
