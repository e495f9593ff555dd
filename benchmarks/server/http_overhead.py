"""What HTTP costs: tokens a second over many streams from engines that answer at once, pagoda beside a peer.

usage: python http_overhead.py --model FOLDER [--peer-python VENV/bin/python] [--streams 256] [--tokens 512]
                               [--rounds 5] [--pace 0.05] [--only completions|chat]

The peer is vLLM. Both are real servers with an engine in a process of its own; only the model is not run (see
instant_pagoda.py and instant_vllm.py). Both serve the same Hugging Face folder and say the same words in answer to
the same prompts, which is checked. One load generator measures both, in turn, round by round; the one that waits is
stopped. Settings are the servers' own but for --max-num-seqs, which is the number of streams, and --max-model-len.

Each path is measured twice. "flat_out": the engine takes no time. Then it is faster than either server, and both
join tokens that wait into one event, so that events per token stand beside the speed. "paced": a step takes --pace
seconds, so that both send every token as an event of its own; what counts is the CPU time that all processes of a
server take for a million tokens, which other programs on the machine change little. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from instant_answer import set_pace

HERE = Path(__file__).resolve().parent
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LONGEST = 4096


def pagoda(model: str, streams: int, port: int) -> list[str]:
    """The command that serves with pagoda."""
    flags = ["--served-model-name", "m", "--port", str(port), "--max-num-seqs", str(streams)]
    return [sys.executable, str(HERE / "instant_pagoda.py"), model, *flags, "--max-model-len", str(LONGEST)]


def vllm(python: str, model: str, streams: int, port: int) -> list[str]:
    """The command that serves with vLLM."""
    flags = ["--served-model-name", "m", "--port", str(port), "--max-num-seqs", str(streams)]
    executor = ["--distributed-executor-backend", "instant_vllm.InstantExecutor"]
    program = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*program, *flags, "--max-model-len", str(LONGEST), *executor]


class Server:
    """A server that is stopped while it is not measured."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path) -> None:
        self.port = port
        log = folder / f"{name}.log"
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "INSTANT_PACE": str(folder / "pace")}
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).status == 200
        except OSError:
            return False

    def _pids(self) -> list[int]:
        """Every process of the session: engines put theirs into process groups of their own."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == self._process.pid:
                        found.append(int(entry.name))
                except ProcessLookupError:
                    pass
        return found

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in self._pids():
            os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """What its processes have taken so far."""
        ticks = 0
        for pid in self._pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def measure(self, path: str, streams: int, tokens: int) -> dict:
        """One round."""
        self.signal(signal.SIGCONT)
        before = self.cpu_seconds()
        words = [sys.executable, str(HERE / "http_load.py"), str(self.port), path, str(streams), str(tokens), "m"]
        found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
        found["server_cpu_s_per_million"] = (self.cpu_seconds() - before) / (streams * tokens) * 1e6
        self.signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End all its processes."""
        self.signal(signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(servers: dict[str, Server], path: str, streams: int, tokens: int, rounds: int) -> dict:
    """All rounds on one path, the servers in turn. Raises SystemExit when they do not say the same."""
    for server in servers.values():
        server.measure(path, streams, 32)
    runs: dict[str, list[dict]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            runs[name].append(server.measure(path, streams, tokens))
    if len({run["digest"] for each in runs.values() for run in each}) > 1:
        raise SystemExit(f"the servers do not say the same: {runs}")
    found: dict = {name: summary(each) for name, each in runs.items()}
    if len(servers) > 1:
        ours, theirs = (found[name] for name in servers)
        ratios = [a / b for a, b in zip(ours["tokens_per_s"], theirs["tokens_per_s"])]
        found["ratio"] = {"rounds": [round(each, 2) for each in ratios], "median": round(statistics.median(ratios), 2)}
        found["cpu_ratio"] = round(theirs["server_cpu_s_per_million"] / ours["server_cpu_s_per_million"], 2)
    return found


def summary(runs: list[dict]) -> dict:
    """Each round's speed, and medians of the rest."""

    def median(key: str, digits: int) -> float:
        return round(statistics.median(run[key] for run in runs), digits)

    return {
        "tokens_per_s": [round(run["tokens_per_s"]) for run in runs],
        "median": round(statistics.median(run["tokens_per_s"] for run in runs)),
        "server_cpu_s_per_million": median("server_cpu_s_per_million", 1),
        "events_per_token": median("events_per_token", 3),
        "first_event_median_s": median("first_event_median_s", 3),
        "load_generator_busy": round(statistics.median(run["own_cpu_seconds"] / run["seconds"] for run in runs), 2),
    }


def main() -> None:
    """Start the servers, measure them in turn, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder, whose tokenizer writes blanks as bytes")
    parser.add_argument("--peer-python", help="interpreter of an environment with vllm")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step where it takes time")
    parser.add_argument("--only", choices=PATHS)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    set_pace(folder / "pace", 0)
    servers: dict[str, Server] = {}
    try:
        port = free_port()
        command = pagoda(args.model, args.streams, port)
        servers["pagoda"] = Server("pagoda", command, port, folder)
        if args.peer_python:
            servers["pagoda"].signal(signal.SIGSTOP)
            port = free_port()
            command = vllm(args.peer_python, args.model, args.streams, port)
            servers["vllm"] = Server("vllm", command, port, folder)
        found: dict = {"streams": args.streams, "tokens": args.tokens, "pace": args.pace}
        for name in [args.only] if args.only else PATHS:
            found[name] = {}
            for mode, pace, tokens in (("flat_out", 0.0, args.tokens), ("paced", args.pace, args.tokens // 4)):
                set_pace(folder / "pace", pace)
                found[name][mode] = measure(servers, PATHS[name], args.streams, tokens, args.rounds)
        print(json.dumps(found))
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
