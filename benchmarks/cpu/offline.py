"""Offline throughput and single-stream speed, pagoda beside a peer in one run.

usage: python offline.py --model MODEL [--peer-python VENV/bin/python --peer-model FOLDER] [--rounds 3]

The engines run in turn, round by round; the one that waits is stopped with SIGSTOP, so that its idle threads take
nothing from the other. Prints one JSON line: medians, and the ratio of each round. The peer is vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

CASES = {"throughput_64x128_128": (64, 128, 128), "single_stream_128_128": (1, 128, 128)}


class Worker:
    """An engine process that sleeps unless asked."""

    def __init__(self, python: str, module: str, model: str, dtype: str) -> None:
        script = Path(__file__).with_name("offline_worker.py")
        self.process = subprocess.Popen(
            [python, str(script), module, model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{module} did not start; run {script.name} by hand to see why")
        self.pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """To every process of the session: engines put their workers into process groups of their own."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    os.kill(int(entry.name), number)

    def run(self, requests: int, inputs: int, outputs: int) -> float:
        """Output tokens per second."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(f"{requests} {inputs} {outputs}\n")
        self.process.stdin.flush()
        seconds = float(self.process.stdout.readline())
        self.pause()
        return requests * outputs / seconds

    def close(self) -> None:
        self._signal(signal.SIGKILL)


def measure(workers: dict[str, Worker], cases: list[str], rounds: int) -> dict:
    results: dict = {}
    for worker in workers.values():
        worker.run(2, 16, 8)
    for case in cases:
        shape = CASES[case]
        runs: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, worker in workers.items():
                runs[name].append(round(worker.run(*shape), 2))
        results[case] = {
            name: {"tokens_per_s": values, "median": statistics.median(values)} for name, values in runs.items()
        }
        if "vllm" in runs:
            ratios = [ours / theirs for ours, theirs in zip(runs["pagoda"], runs["vllm"])]
            results[case]["ratio"] = {
                "rounds": [round(r, 2) for r in ratios],
                "median": round(statistics.median(ratios), 2),
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="what pagoda serves")
    parser.add_argument("--peer-python", help="interpreter of an environment with vllm")
    parser.add_argument("--peer-model", help="the same weights as a Hugging Face folder; default: --model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    workers = {"pagoda": Worker(sys.executable, "pagoda", args.peer_model or args.model, args.dtype)}
    try:
        if args.peer_python:
            workers["vllm"] = Worker(args.peer_python, "vllm", args.peer_model or args.model, args.dtype)
        print(json.dumps(measure(workers, args.cases, args.rounds)))
    finally:
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    main()
