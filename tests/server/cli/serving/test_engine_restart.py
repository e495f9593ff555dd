"""--restart-engine beside a liveness probe: the server is left alone while a killed engine is replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse

from support.servers.served import served, wait_ready
from support.suite.watching import PATIENCE, eventually, programs


def opened(address: str, method: str, path: str, body: object = None) -> tuple[HTTPConnection, HTTPResponse]:
    connection = HTTPConnection(address, timeout=PATIENCE)
    raw = None if body is None else json.dumps(body).encode()
    connection.request(method, path, raw, {"content-type": "application/json"})
    return connection, connection.getresponse()


def get(address: str, path: str) -> tuple[int, str]:
    connection, response = opened(address, "GET", path)
    with closing(connection):
        return response.status, response.read().decode()


def restarts(address: str) -> float:
    found = re.search(r"^pagoda:engine_restarts_total(?:{.*})? (\S+)$", get(address, "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_liveness_probe_passes_while_an_engine_is_replaced() -> None:
    with served("fake:endless", "--restart-engine", "2") as (process, url):
        wait_ready(process)
        address = url.removeprefix("http://")
        (engine,) = [pid for pid, name in programs(process.pid).items() if "engine" in name]
        body = {"prompt": "a", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
        connection, stream = opened(address, "POST", "/v1/completions", body)
        assert stream.readline().startswith(b"data: ")
        probes, done = list[int](), threading.Event()

        def probe() -> None:
            while not done.is_set():
                probes.append(get(address, "/health")[0])
                done.wait(0.01)

        thread = threading.Thread(target=probe)
        thread.start()
        try:
            os.kill(engine, signal.SIGKILL)
            events = [event.strip() for event in stream.read().decode().split("\n\n") if event.strip()]
            eventually(lambda: restarts(address) == 1 and get(address, "/ready")[0] == 200)
        finally:
            done.set()
            thread.join(PATIENCE)
            connection.close()
        assert set(probes) == {200}
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["message"] == "the engine ended while it ran this request and is being restarted; send it again"
        assert events[-1] == "data: [DONE]"
        connection, response = opened(address, "POST", "/v1/completions", body | {"stream": False, "max_tokens": 2})
        with closing(connection):
            assert response.status == 200
