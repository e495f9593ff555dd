"""Offline throughput and single-stream speed, pagoda beside a peer in one run.

usage: python offline.py --model MODEL [--peer vllm|llama --peer-python VENV/bin/python] [--rounds 3] [--cases all]
           [--quantization METHOD...] [--neighbour]

The engines run in turn, round by round; the one that waits is stopped with SIGSTOP, so that its idle threads take
nothing from the other. Prints one JSON line: the processor, medians, and of each round pagoda's ratio to the others.
`--peer llama`: llama.cpp, MODEL is a GGUF file. `--quantization`: pagoda again, with each of these methods.
`--neighbour` runs each case a second time beside a process that keeps one core busy, and adds what share of the quiet
throughput each engine keeps.
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
from operator import truediv
from pathlib import Path

CASES = {  # requests, tokens of each prompt, of each answer, and of these prompt tokens those that all share
    "throughput_64x128_128": (64, 128, 128, 0),
    "single_stream_128_128": (1, 128, 128, 0),
    "throughput_8x128_128": (8, 128, 128, 0),
    "throughput_256x128_128": (256, 128, 128, 0),
    "prompts_16x512_16": (16, 512, 16, 0),
    "shared_prefix_32x1024_64": (32, 1024 + 32, 64, 1024),
}
PEERS = ("vllm", "llama")
USUAL = ("throughput_64x128_128", "single_stream_128_128")


class Worker:
    """An engine process that sleeps unless asked."""

    def __init__(self, python: str, module: str, model: str, dtype: str, *more: str) -> None:
        script = Path(__file__).with_name("llama_worker.py" if module == "llama" else "offline_worker.py")
        self.process = subprocess.Popen(
            [python, str(script), module, model, dtype, *more],
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

    def run(self, requests: int, inputs: int, outputs: int, shared: int = 0, *, busy: bool = False) -> float:
        """Output tokens per second. `busy`: beside a process that keeps one core busy."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(f"{requests} {inputs} {outputs} {shared} {busy:d}\n")
        self.process.stdin.flush()
        seconds = float(self.process.stdout.readline())
        self.pause()
        return requests * outputs / seconds

    def close(self) -> None:
        self._signal(signal.SIGKILL)


def measure(workers: dict[str, Worker], cases: list[str], rounds: int, neighbour: bool) -> dict:
    results: dict = {}
    for worker in workers.values():
        worker.run(2, 16, 8)
    for case in cases:
        quiet, beside = ({name: [] for name in workers} for _ in range(2))
        for _ in range(rounds):
            for name, worker in workers.items():
                quiet[name].append(round(worker.run(*CASES[case]), 2))
                if neighbour:
                    beside[name].append(round(worker.run(*CASES[case], busy=True), 2))
        results[case] = summary(quiet)
        if neighbour:
            kept = {name: round(statistics.median(map(truediv, beside[name], quiet[name])), 2) for name in workers}
            results[f"{case}_beside_a_busy_process"] = summary(beside) | {"share_of_quiet": kept}
        print(json.dumps({case: results[case]}), file=sys.stderr, flush=True)
    return results


def summary(runs: dict[str, list[float]]) -> dict:
    result: dict = {name: {"tokens_per_s": each, "median": statistics.median(each)} for name, each in runs.items()}
    for name in list(runs)[1:]:
        ratios = [ours / theirs for ours, theirs in zip(runs["pagoda"], runs[name])]
        key = "ratio" if name in PEERS else f"ratio to {name}"
        result[key] = {"rounds": [round(r, 2) for r in ratios], "median": round(statistics.median(ratios), 2)}
    return result


def processor() -> str:
    """Model, cores that may be used, and the instruction sets that decide which kernels serve."""
    text = Path("/proc/cpuinfo").read_text()
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in text.splitlines()}
    known = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"} & set(fields["flags"].split())
    return f"{fields['model name']}, {len(os.sched_getaffinity(0))} cores, {' '.join(sorted(known))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="what pagoda serves")
    parser.add_argument("--peer", choices=PEERS, default="vllm")
    parser.add_argument("--peer-python", help="interpreter of an environment with vllm, or with llama-cpp-python")
    parser.add_argument("--quantization", nargs="*", default=[], help="measure pagoda with these, too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "all"], default=list(USUAL))
    parser.add_argument("--neighbour", action="store_true", help="measure beside a busy process, too")
    args = parser.parse_args()
    cases = list(CASES) if "all" in args.cases else args.cases
    workers = {"pagoda": Worker(sys.executable, "pagoda", args.model, args.dtype)}
    try:
        for method in args.quantization:
            workers[f"pagoda {method}"] = Worker(sys.executable, "pagoda", args.model, args.dtype, method)
        if args.peer_python:
            workers[args.peer] = Worker(args.peer_python, args.peer, args.model, args.dtype)
        results = measure(workers, cases, args.rounds, args.neighbour)
        print(json.dumps({"processor": processor(), "load": os.getloadavg()} | results))
    finally:
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    main()
