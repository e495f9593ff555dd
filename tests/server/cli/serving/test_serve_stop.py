"""`pagoda serve` is stopped: what happens to its requests, its exit status, its folders and sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event

import pytest
from support.servers.served import FAKE, environment, served, wait_for, wait_ready
from support.suite.watching import PATIENCE, eventually


def stream(url: str, tokens: int, begun: Event) -> bytes:
    """Return all that a streamed completion sends, up to its end or to that of the connection."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    body = {"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    begun.set()
    return response.read()


def streamed(pool: ThreadPoolExecutor, url: str, tokens: int, count: int) -> list[Future[bytes]]:
    """What so many streams send. They have begun: before that the answer of a server that stops is a 503."""
    begun = [Event() for _ in range(count)]
    streams = [pool.submit(stream, url, tokens, each) for each in begun]
    eventually(lambda: all(each.is_set() or answer.done() for each, answer in zip(begun, streams)))
    return streams


def completion(url: str, tokens: int) -> tuple[int, str, bytes]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.headers["content-type"], response.read()


def running(url: str) -> int:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    connection.request("GET", "/load")
    load: int = json.loads(connection.getresponse().read())["server_load"]
    return load


TRACKED = "--enable-server-load-tracking"


def test_admitted_requests_finish_within_the_shutdown_timeout() -> None:
    with served("fake:slow", TRACKED, "--shutdown-timeout", "600") as (process, url), ThreadPoolExecutor(6) as pool:
        wait_ready(process)
        streams = streamed(pool, url, 100, 4)
        whole = [pool.submit(completion, url, 100) for _ in range(2)]
        eventually(lambda: running(url) == 6)
        process.send_signal(signal.SIGTERM)
        for each in streams:
            assert b"[DONE]" in each.result()
            assert b'"error"' not in each.result()
        assert [each.result()[0] for each in whole] == [200] * 2
        assert process.wait(PATIENCE) == 0


def test_longer_requests_get_an_error_by_the_deadline_as_the_exit_status_says() -> None:
    with (
        served("fake:endless", TRACKED, "--shutdown-timeout", "1.5") as (process, url),
        ThreadPoolExecutor(8) as pool,
    ):
        wait_ready(process)
        streams = streamed(pool, url, 60_000, 4)
        whole = [pool.submit(completion, url, 60_000) for _ in range(4)]
        eventually(lambda: running(url) == 8)
        process.send_signal(signal.SIGTERM)
        for each in streams:
            assert b"shutting down" in each.result()
        for each in whole:
            status, kind, body = each.result()
            assert (status, kind) == (503, "application/json")
            assert b"shutting down" in body
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        log = process.stderr.read()
    assert "8 requests were cut" in log
    assert "Traceback" not in log


def test_a_second_signal_ends_requests_with_an_error_at_once() -> None:
    with served("fake:endless", TRACKED, "--shutdown-timeout", "60") as (process, url), ThreadPoolExecutor(8) as pool:
        wait_ready(process)
        streams = streamed(pool, url, 60_000, 4)
        whole = [pool.submit(completion, url, 60_000) for _ in range(4)]
        eventually(lambda: running(url) == 8)
        process.send_signal(signal.SIGTERM)
        wait_for(process, "stopping; 8 requests")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # a third does no harm
        assert all(b"shutting down" in each.result() for each in streams)
        assert all(each.result()[:2] == (503, "application/json") for each in whole)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def num_unread(port: int, client_port: int) -> int:
    """Bytes that a server on loopback has sent on a connection and its client's kernel has not taken."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (local[-4:], remote[-4:]) == (f"{port:04X}", f"{client_port:04X}"):
            return int(queues.partition(":")[0], 16)
    return 0


def test_a_client_that_does_not_read_does_not_delay_the_exit() -> None:
    with served("fake:endless", TRACKED) as (process, url):
        wait_ready(process)
        port = int(url.rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"prompt": ["a"] * 200, "max_tokens": 60_000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: running(url) == 1)
        client.recv(1)  # the response has begun, and is read no further
        eventually(lambda: num_unread(port, client.getsockname()[1]) > 10_000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        client.close()


@contextmanager
def on_socket(path: Path, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, *FAKE, "fake", "--uds", str(path), "--rpc-base-path", str(path.parent), *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment() | variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def make_old(path: Path) -> None:
    """Make a file or folder one of an hour ago."""
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))


@pytest.mark.setting("--uds")
@pytest.mark.parametrize("moment", ["bound", "engine", "socket", "listening", "ready"])
def test_a_signal_while_loading_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "s"
    with on_socket(path) as process:
        eventually(path.exists)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if moment == "engine":
            eventually(lambda: list(tmp_path.glob("pagoda-ipc-*")))
        elif moment == "socket":
            eventually(lambda: list(tmp_path.glob("pagoda-ipc-*/engine.out")))
        elif moment != "bound":
            wait_for(process, {"listening": "listening on", "ready": "ready after"}[moment])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with on_socket(path) as process:
        wait_ready(process)
        (left,) = tmp_path.glob("pagoda-ipc-*")
        sockets = [each for each in left.iterdir() if each.is_socket()]
        assert len(sockets) == 2
        assert {stat.S_IMODE(each.stat().st_mode) for each in sockets} == {0o600}
        process.kill()
    make_old(left)  # younger ones are taken for folders that are being created
    (tmp_path / "pagoda-ipc-other").write_text("a file stays")
    with on_socket(path) as first, on_socket(tmp_path / "t") as second:
        wait_ready(first)
        wait_ready(second)
        assert not left.exists()
        assert len([each for each in tmp_path.glob("pagoda-ipc-*") if each.is_dir()]) == 2  # each has its own
        for each in tmp_path.glob("pagoda-ipc-*"):
            make_old(each)
        with on_socket(tmp_path / "u") as third:
            wait_ready(third)
            assert len([each for each in tmp_path.glob("pagoda-ipc-*") if each.is_dir()]) == 3
        for process in (first, second):
            process.terminate()
            assert process.wait(PATIENCE) == 0
    assert os.path.exists(tmp_path / "pagoda-ipc-other")
