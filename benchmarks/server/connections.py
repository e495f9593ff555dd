"""Idle and half-open connections: are new clients served, how much memory do they take, and when are they closed?

    python benchmarks/server/connections.py MODEL [--connections 5000] [--api-server-count 1]

Starts a server, opens idle sockets, half request heads and heads of the maximum size, and sends requests meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-a: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--api-server-count", type=int, default=1)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.connections + 500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    words = [sys.executable, "-m", "pagoda.server.cli.main", "serve", args.model, "--served-model-name", "m"]
    words += ["--port", "0", "--api-server-count", str(args.api_server_count), "--disable-uvicorn-access-log"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        print(json.dumps(measure(server, args.connections), indent=2))
    finally:
        server.terminate()
        server.communicate()


def measure(server: subprocess.Popen[str], count: int) -> dict[str, Any]:
    port = wait_ready(server)
    request(port)
    before = memory(server.pid)
    began = time.monotonic()
    clients = [opened(port, index) for index in range(count)]
    opening = time.monotonic() - began
    latencies = [request(port) for _ in range(10)]
    peak = memory(server.pid)
    began = time.monotonic()
    closed = sum(is_closed(client) for client in clients)
    result = {
        "connections": count,
        "seconds to open them": round(opening, 2),
        "worst latency of a completion, s": round(max(latencies), 3),
        "memory of the API processes, MiB": round(before / 2**20),
        "and with the connections, MiB": round(peak / 2**20),
        "closed by the server": closed,
        "seconds until all were closed": round(time.monotonic() - began + sum(latencies), 1),
    }
    for client in clients:
        client.close()
    return result


def wait_ready(server: subprocess.Popen[str]) -> int:
    """Return the port once the model is warm."""
    assert server.stderr is not None
    port = 0
    for line in server.stderr:
        if found := re.search(r"listening on http://[\d.]+:(\d+)", line):
            port = int(found[1])
        if "ready after" in line:
            return port
    raise SystemExit("the server ended before it was ready")


def opened(port: int, index: int) -> socket.socket:
    """Return a connection: idle, with half a head, or with a head just below the maximum size."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    if index % 3 == 1:
        client.sendall(HALF)
    elif index % 3 == 2:
        client.sendall(HALF + b"a" * 60_000)
    return client


def request(port: int) -> float:
    """Return the seconds that a completion takes."""
    began = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": "a", "max_tokens": 4})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()
    return time.monotonic() - began


def is_closed(client: socket.socket) -> bool:
    """Return whether the server closes the connection within a minute."""
    with suppress(ConnectionError):
        while True:
            try:
                if not client.recv(65536):
                    break
            except TimeoutError:
                return False
    return True


def memory(pid: int) -> int:
    """Return the resident bytes of the API processes: the server's own and, with several, its children's."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    apis = [each for each in pids if b"core_client.engine" not in Path(f"/proc/{each}/cmdline").read_bytes()]
    lines = [line for each in apis for line in Path(f"/proc/{each}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
