"""Engines in processes of their own, measured in turns: round by round, the waiting ones stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.errors import PagodaError

WORKER: Final = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to measure. `options`: arguments of its constructor."""

    name: str  # A name that is unique among the engines.
    engine: str  # One of pagoda, vllm, transformers and llama.cpp.
    options: Mapping[str, Any]
    python: str = sys.executable


@dataclass(frozen=True, slots=True)
class EngineWorkload:
    """Prompts, and the number of tokens to generate after each."""

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[int]


class EngineWorker:
    """An engine's process. It is stopped unless it works, so that its idle threads take nothing from the others."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [spec.python, str(WORKER), spec.engine, json.dumps(dict(spec.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.version = str(self._answer()["version"])
        self._signal(signal.SIGSTOP)

    def run(self, work: EngineWorkload, *, busy: bool = False) -> tuple[float, int]:
        """Return (seconds, output tokens). `busy`: beside a process that keeps one core busy. Raises PagodaError."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        message = {"prompts": list(map(list, work.prompts)), "outputs": list(work.outputs), "busy": busy}
        with contextlib.suppress(BrokenPipeError):  # There is then no answer, and the log says why.
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return float(answer["seconds"]), int(answer["tokens"])

    def close(self) -> None:
        """End the process and those that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise PagodaError(f"{self.spec.name} failed: {self._last_line()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def _signal(self, number: int) -> None:
        """Send a signal to every process of the session: engines put their workers into process groups of their own."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == self._process.pid:
                    os.kill(int(entry.name), number)


@contextlib.contextmanager
def workers_of(specs: Sequence[EngineSpec]) -> Iterator[list[EngineWorker]]:
    """Start the engines one after the other, and end them. Raises PagodaError if one does not start."""
    workers: list[EngineWorker] = []
    try:
        for spec in specs:
            workers.append(EngineWorker(spec))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def measure(
    workers: Sequence[EngineWorker], work: EngineWorkload, rounds: int, *, busy: bool = False
) -> dict[str, Any]:
    """Return the output tokens per second of each engine in each round, and the ratios of the first to the others."""
    speeds: dict[str, list[float]] = {worker.spec.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            seconds, tokens = worker.run(work, busy=busy)
            speeds[worker.spec.name].append(round(tokens / seconds, 2))
    return summary(speeds)


def summary(speeds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return engine -> its rounds and their median, and under `ratios` the first engine's ratio to each other."""
    first, *others = speeds
    result: dict[str, Any] = {
        name: {"output_tokens_per_s": list(rounds), "median": statistics.median(rounds)}
        for name, rounds in speeds.items()
    }
    ratios = {}
    for name in others:
        round_ratios = [round(ours / theirs, 2) for ours, theirs in zip(speeds[first], speeds[name])]
        ratios[name] = {"rounds": round_ratios, "median": round(statistics.median(round_ratios), 2)}
    return result | {"ratios": ratios}


def weight_bytes(model: str) -> int | None:
    """Return the size of a model's files of weights; None if it is not on this machine."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    files = [*path.glob("*.safetensors"), *path.glob("*.bin")] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) or None
