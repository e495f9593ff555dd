"""Run one stage of the GPU benchmarks; called by gpu.sh.

usage: gpu.sh --output DIR [--carry DIR] [--previous DIR] [--budget SECONDS] [--only PART] STAGE

STAGE is short, second, smoke, decode, prefill, throughput, serving, invariance, peers, kernels, mixers, experts, tune,
tune_mixers or tune_experts. `DIR/STAGE.json` is written after every number.
Numbers of the same code on the same machine, there or in the folder of --previous, are not measured again, so an
interrupted stage resumes. Needs no network and no git; missing Python packages come from --carry.

exit status: 0 all measured and right; 1 something is wrong or failed; 2 nothing can be measured; 3 out of time, run the
same command again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG, NOTHING, UNFINISHED = 1, 2, 3
BUDGET = 470.0
"""Seconds per stage: 8 minutes, less 10 s to finish."""
BUDGETS = {"short": 330.0, "second": 330.0}
"""Seconds of the stages for a GPU that can be had for 15 minutes in all, its start included."""
MIN_REMAINING = 5.0
"""Remaining seconds below which no number is started, at most a fifth of the budget."""
FAILURES = 3
"""Consecutive failures after which a part is given up."""
SOURCES = ("backends", "common", "server", "benchmarks/gpu")


def fingerprint(root: Path) -> str:
    """Return a hash of the measured code: results of other code are not reused."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@dataclass
class Results:
    """A stage's JSON file."""

    path: Path
    head: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, dict[str, dict]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # reasons; failed numbers are tried again
    complete: bool = False
    seconds: float = 0.0

    def take(self, *paths: Path) -> None:
        """Load numbers of earlier runs with the same head."""
        for path in paths:
            try:
                earlier = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if all(earlier.get(key) == value for key, value in self.head.items()):
                self.machine = self.machine or earlier["machine"]
                if earlier["machine"] == self.machine:
                    for part, numbers in earlier["numbers"].items():
                        self.numbers[part] = numbers | self.numbers.get(part, {})

    @property
    def names(self) -> list[str]:
        return [f"{part}/{name}" for part, numbers in self.numbers.items() for name in numbers]

    @property
    def wrong(self) -> list[str]:
        return [
            f"{part}/{name}"
            for part, numbers in self.numbers.items()
            for name, result in numbers.items()
            if result.get("right") is False
        ]

    def on(self, machine: dict[str, Any]) -> None:
        """Drop the numbers of another machine."""
        if self.machine != machine:
            self.machine, self.numbers = machine, {}

    def write(self) -> None:
        """Write the file atomically."""
        state = {
            "wrong": self.wrong,
            "failed": self.failed,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
        }
        text = json.dumps({**self.head, "machine": self.machine, **state, "numbers": self.numbers}, indent=1)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(text + "\n")
        temporary.replace(self.path)


class Process:
    """Runs part.py and everything it starts."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], log: Path, clock: Callable[[], float]
    ) -> None:
        command = [sys.executable, "-m", "pagoda.benchmarks.gpu.part", *arguments]
        self.log, self._errors, self._buffer, self._exit_timeout = log, log.open("wb"), b"", 10.0
        self._clock = clock
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018
        os.set_blocking(self._process.stdout.fileno(), False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._process.stdout, selectors.EVENT_READ)

    def send(self, **line: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its output tells
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def line(self, until: float) -> dict[str, Any] | None:
        """Return the next line, or None at the end. Raise TimeoutError."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = until - self._clock()
            if left <= 0 or not self._ready.select(left):
                self._exit_timeout = 0.0
                raise TimeoutError
            if not (more := self._process.stdout.read()):
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> int:
        """Kill what still runs shortly after the last line; return the exit status."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._exit_timeout)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._ready.close()
        self._errors.close()
        return self._process.wait()

    def tail(self) -> str:
        """Return the end of its standard error."""
        return self.log.read_text(errors="replace")[-3000:]


class Stage:
    """Runs the parts of a stage until a deadline of the clock."""

    def __init__(
        self,
        results: Results,
        options: list[str],
        environment: dict[str, str],
        logs: Path,
        until: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results, self.until, self._clock = results, until, clock
        self.reserve = min(MIN_REMAINING, (until - clock()) / 5)
        self._options, self._environment, self._logs = options, environment, logs
        self._began, self._measured = clock(), 0
        self._tried, self._again = set[str](), set[str]()

    def run(self, parts: tuple[str, ...]) -> bool:
        """Return True when every number has been measured or has failed. Raise NoGpuError."""
        left, failures = list(parts), Counter[str]()
        while left:
            if self.until - self._clock() < self.reserve:
                return False
            measured, tried = self._count(), len(self._tried)
            outcome, part = self._process(left)
            if outcome != "failed":
                return outcome == "done"
            failures[part] = len(self._tried) - tried + (0 if self._count() > measured else failures[part])
            if failures[part] >= FAILURES:
                print(f"{part}: given up after {FAILURES} failures", flush=True)
                left = [] if part not in left else [name for name in left if name != part]
        return True

    def _count(self) -> int:
        return sum(map(len, self.results.numbers.values()))

    def _process(self, parts: list[str]) -> tuple[str, str]:
        """Return `done`, `unfinished`, or `failed` if a number failed and others may be left; and the current part."""
        self._measured = 0
        process = Process([*parts, *self._options], self._environment, self._logs / "part.log", self._clock)
        part, number, limit = "", "start", self.until
        try:
            while (line := process.line(min(limit, self.until))) is not None:
                if "machine" in line:
                    self.results.on(line["machine"])
                    if line["machine"]["device"] == "cuda" and line["machine"]["gpu"] is None:
                        raise NoGpuError
                    process.send(leave_out=[*self.results.names, *self._tried], until=self.until - self.reserve)
                elif "part" in line:
                    part, number = line["part"], "start"
                elif "begin" in line:
                    number, limit = line["begin"], self._clock() + line["seconds"]
                elif "error" in line:
                    return self._failed(part, number, line["error"])
                elif "result" in line:
                    self._measured_one(part, number, line["result"])
                    number, limit = "start", self.until
                else:
                    return "done", part
        except TimeoutError:
            if self._clock() >= self.until:
                return "unfinished", part
            return self._failed(part, number, f"timed out\n{process.tail()}")
        finally:
            status = process.end()
        if status == 0:
            return "unfinished", part
        return self._failed(part, number, f"exit status {status}\n{process.tail()}")

    def _measured_one(self, part: str, number: str, result: dict) -> None:
        self._measured += 1
        self.results.numbers.setdefault(part, {})[number] = result
        self.results.failed.pop(f"{part}/{number}", None)
        self.write()
        print(f"{part}/{number} {result['took_s']} s {json.dumps(result)[:600]}", flush=True)

    def _failed(self, part: str, number: str, why: str) -> tuple[str, str]:
        """Record a failure. A number is retried once in a new process if this one had measured others before."""
        name = f"{part}/{number}"
        if not self._measured or name in self._again:
            self._tried.add(name)
        self._again.add(name)
        self.results.failed[f"{part}/{number}"] = why
        self.write()
        print(f"{part}/{number} FAILED {why}", flush=True)
        return "failed", part

    def write(self) -> None:
        self.results.seconds = self._clock() - self._began
        self.results.write()


class NoGpuError(Exception):
    """No GPU to measure on."""


@contextmanager
def importable() -> Iterator[Path]:
    """Yield a folder for PYTHONPATH from which `import pagoda` finds this checkout, installed or not."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pagoda").symlink_to(REPOSITORY)
        yield Path(folder)


def best(numbers: dict[str, dict[str, dict]]) -> dict[str, dict]:
    """Return the fastest settings of each key of the tuning tables, with their time relative to the current ones."""
    fastest: dict[str, dict] = {}
    usual: dict[str, float] = {}
    for trial in (each for part in numbers.values() for each in part.values() if "key" in each):
        if "us" in trial:
            usual.setdefault(trial["key"], trial["us"])  # the current settings are tried first
            if trial["us"] < fastest.get(trial["key"], {"us": float("inf")})["us"]:
                fastest[trial["key"]] = {name: trial[name] for name in ("us", "settings", "pieces") if name in trial}
    return {key: chosen | {"of_usual": chosen["us"] / usual[key]} for key, chosen in fastest.items()}


def precompile(stage: str, environment: dict[str, str], until: float) -> float:
    """Compile the stage's kernels on all processors, for at most half of the time; return the seconds it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pagoda.benchmarks.gpu.precompile", stage, "--processes", str(os.cpu_count() or 1)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait((until - began) / 2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return round(time.monotonic() - began, 1)


def options(args: argparse.Namespace, model: Path | None) -> list[str]:
    given = ["--device", args.device, "--spoil", str(args.spoil)]
    return given + ["--tiny"] * args.tiny + (["--model", str(model)] if model else [])


def main() -> int:
    from pagoda.benchmarks.gpu import carried
    from pagoda.benchmarks.gpu.stages import STAGES, TRIALS

    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=tuple(STAGES))
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--carry", type=Path, help="folder that make gpu-carry built")
    parser.add_argument("--previous", type=Path, help="folder of an earlier run's JSON files")
    parser.add_argument("--work", type=Path, help="folder for unpacked files, kept (default: in the temporary folder)")
    parser.add_argument("--budget", type=float, help=f"seconds that the stage may take (default: {BUDGETS}, {BUDGET})")
    parser.add_argument("--only", action="append", help="a part of the stage, such as gemm.checks")
    parser.add_argument("--model", type=Path, help="a GGUF file in place of the carried one")
    parser.add_argument("--commit", help="commit named in the JSON (default: recorded by make gpu-carry)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script, without kernels"
    )
    parser.add_argument(
        "--precompile", action="store_true", help="compile on all processors first, as trials always do"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--spoil", type=float, default=0.0, help="relative error added to results: every check must detect it"
    )
    args = parser.parse_args()
    budget = BUDGETS.get(args.stage, BUDGET) if args.budget is None else args.budget
    until = time.monotonic() + budget
    unknown = set(args.only or ()) - set(STAGES[args.stage])
    if unknown:
        parser.error(f"--only: {unknown.pop()} is not of {args.stage}; its parts are {', '.join(STAGES[args.stage])}")
    args.output.mkdir(parents=True, exist_ok=True)
    work = args.work or Path(tempfile.gettempdir()) / f"pagoda-gpu-{os.getuid()}"
    files = carried.unpack(args.carry, work)
    code = fingerprint(REPOSITORY)
    setting = {"tiny": args.tiny, "spoil": args.spoil}
    results = Results(args.output / f"{args.stage}.json", {"stage": args.stage, "code": code, **setting})
    results.take(results.path, *([args.previous / results.path.name] if args.previous else []))
    results.head |= {"commit": args.commit or files.commit, "parts": args.only or STAGES[args.stage]}
    before = carried.cache_entries(files.cache)
    paths = [*sys.path[:1], str(files.site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TRITON_CACHE_DIR": str(files.cache),
        "TRITON_STORE_BINARY_ONLY": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if args.device == "cpu":
        environment["PAGODA_TORCH_CUDA_DEVICE"] = "cpu"
    if args.precompile or (args.stage in TRIALS and args.device == "cuda"):
        results.head["precompile_s"] = precompile(args.stage, environment, until)
    parts = tuple(args.only or STAGES[args.stage])
    print(f"{args.stage}, at most {budget:.0f} s, in this order: {', '.join(parts)}", flush=True)
    stage = Stage(results, options(args, args.model or files.model), environment, work, until)
    try:
        results.complete = stage.run(parts)
    except NoGpuError:
        print("gpu.sh: no GPU found; nothing was measured", file=sys.stderr)
        return NOTHING
    if args.stage in TRIALS:
        results.head["best"] = best(results.numbers)
    new = 0 if args.stage in TRIALS else carried.keep_cache(files.cache, args.output / carried.KEPT_CACHE, before)
    results.head["carried"] = {"packages": files.unpacked, "cache_entries": len(before), "compiled": new}
    stage.write()
    return report(results)


def report(results: Results) -> int:
    """Print the outcome; return the exit status."""
    count = sum(map(len, results.numbers.values()))
    state = f"{len(results.wrong)} wrong, {len(results.failed)} failed, {results.seconds:.0f} s"
    print(f"{results.path}: {count} numbers, {state}")
    for name in results.wrong:
        print(f"WRONG {name}")
    for name, why in results.failed.items():
        print(f"FAILED {name}: {why.strip().splitlines()[-1]}")
    if results.wrong or results.failed:
        return WRONG
    return 0 if results.complete else UNFINISHED


if __name__ == "__main__":
    with importable() as path:
        sys.path.insert(0, str(path))
        sys.exit(main())
