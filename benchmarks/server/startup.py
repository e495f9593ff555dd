"""Seconds from the command `pagoda serve` to the first streamed token of a chat answer.

usage: python startup.py --model MODEL [--rounds 5] [-- COMMAND PREFIX]

A client tries a streamed chat request every 20 ms from the moment the command starts. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import time

BODY = json.dumps(
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True, "temperature": 0}
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_token(port: int) -> bool:
    """True when a streamed answer has brought some text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return False
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return True
        return False
    except OSError:
        return False
    finally:
        connection.close()


def run(command: list[str]) -> float:
    port = free_port()
    begin = time.perf_counter()
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not first_token(port):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - begin
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    command = [sys.executable, "-m", "pagoda.server.cli.main", "serve", args.model]
    seconds = [round(run(command), 2) for _ in range(args.rounds)]
    print(json.dumps({"seconds_to_first_token": seconds, "median": statistics.median(seconds)}))


if __name__ == "__main__":
    main()
