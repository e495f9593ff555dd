"""A stage of what a GPU has to show; called by gpu.sh.

usage: gpu.sh --output DIR [--carry DIR] [--previous DIR] [--budget SECONDS] [--only PART] STAGE

STAGE is smoke, decode, prefill, throughput, peers, kernels or tune. `DIR/STAGE.json` is written after every number.
Numbers that the same code has on the same machine, there or in the folder of --previous, are not measured again, so a
stage that was cut off goes on where it was. Needs no network and no git; Python packages that the machine lacks come
from --carry.

exit status: 0 all measured and right; 1 something is wrong or failed; 2 nothing can be measured; 3 the time is over,
run the same command again.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG, NOTHING, UNFINISHED = 1, 2, 3
BUDGET = 470.0
"""Seconds of a stage, which leaves 10 of 8 minutes for its end."""
LEAST = 5.0
"""Seconds below which no number is begun."""
FAILURES = 3
"""Numbers of a part that may fail one after the other before the rest is given up."""
SOURCES = ("backends", "common", "server", "benchmarks/gpu")


def fingerprint(root: Path) -> str:
    """Of the code that is measured: numbers of other code are not taken for this one's."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@dataclass
class Results:
    """A stage's JSON file. `failed`: why a number could not be measured; it is tried again."""

    path: Path
    head: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, dict[str, dict]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    seconds: float = 0.0

    def take(self, *paths: Path) -> None:
        """Numbers of earlier runs with the same head."""
        for path in paths:
            try:
                found = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if all(found.get(key) == value for key, value in self.head.items()):
                self.machine = self.machine or found["machine"]
                if found["machine"] == self.machine:
                    for part, numbers in found["numbers"].items():
                        self.numbers[part] = numbers | self.numbers.get(part, {})

    @property
    def names(self) -> list[str]:
        return [f"{part}/{name}" for part, numbers in self.numbers.items() for name in numbers]

    @property
    def wrong(self) -> list[str]:
        return [
            f"{part}/{name}"
            for part, numbers in self.numbers.items()
            for name, found in numbers.items()
            if found.get("right") is False
        ]

    def on(self, machine: dict[str, Any]) -> None:
        """Numbers of another machine are dropped."""
        if self.machine != machine:
            self.machine, self.numbers = machine, {}

    def write(self) -> None:
        """Whole or not at all."""
        state = {
            "wrong": self.wrong,
            "failed": self.failed,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
        }
        text = json.dumps({**self.head, "machine": self.machine, **state, "numbers": self.numbers}, indent=1)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(self.path)


class Process:
    """Runs part.py. What it has started ends with it."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "pagoda.benchmarks.gpu.part", *arguments]
        self.log, self._errors, self._buffer, self._patience = log, log.open("wb"), b"", 10.0
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

    def ask(self, **line: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as its lines will say
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def line(self, until: float) -> dict[str, Any] | None:
        """The next line, or None at its end. Raises TimeoutError."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not self._ready.select(left):
                self._patience = 0.0
                raise TimeoutError
            if not (more := self._process.stdout.read()):
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> int:
        """Its exit status; what still runs, seconds after its last line, is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._ready.close()
        self._errors.close()
        return self._process.wait()

    def tail(self) -> str:
        """The end of what it wrote to its standard error."""
        return self.log.read_text(errors="replace")[-3000:]


class Stage:
    """Runs the parts of a stage until a second of time.monotonic."""

    def __init__(
        self, results: Results, options: list[str], environment: dict[str, str], logs: Path, until: float
    ) -> None:
        self.results, self.until = results, until
        self._options, self._environment, self._logs = options, environment, logs
        self._began, self._measured = time.monotonic(), 0
        self._tried, self._again = set[str](), set[str]()

    def run(self, parts: tuple[str, ...]) -> bool:
        """True when every number has been measured or has failed. Raises NoGpuError."""
        left, failures = list(parts), Counter[str]()
        while left:
            if self.until - time.monotonic() < LEAST:
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
        """`done`, `unfinished`, or `failed` where a number was and others may be left; the part that it came to."""
        self._measured = 0
        process = Process([*parts, *self._options], self._environment, self._logs / "part.log")
        part, number, limit = "", "start", self.until
        try:
            while (line := process.line(min(limit, self.until))) is not None:
                if "machine" in line:
                    self.results.on(line["machine"])
                    if line["machine"]["device"] == "cuda" and line["machine"]["gpu"] is None:
                        raise NoGpuError
                    process.ask(leave_out=[*self.results.names, *self._tried], until=self.until - LEAST)
                elif "part" in line:
                    part, number = line["part"], "start"
                elif "begin" in line:
                    number, limit = line["begin"], time.monotonic() + line["seconds"]
                elif "error" in line:
                    return self._failed(part, number, line["error"])
                elif "found" in line:
                    self._found(part, number, line["found"])
                    number, limit = "start", self.until
                else:
                    return "done", part
        except TimeoutError:
            if time.monotonic() >= self.until:
                return "unfinished", part
            return self._failed(part, number, f"took longer than it may\n{process.tail()}")
        finally:
            status = process.end()
        if status == 0:
            return "unfinished", part
        return self._failed(part, number, f"exit status {status}\n{process.tail()}")

    def _found(self, part: str, number: str, found: dict) -> None:
        self._measured += 1
        self.results.numbers.setdefault(part, {})[number] = found
        self.results.failed.pop(f"{part}/{number}", None)
        self.write()
        print(f"{part}/{number} {json.dumps(found)[:600]}", flush=True)

    def _failed(self, part: str, number: str, why: str) -> tuple[str, str]:
        """Where the process has measured others before, the number is tried once more, by a process of its own."""
        name = f"{part}/{number}"
        if not self._measured or name in self._again:
            self._tried.add(name)
        self._again.add(name)
        self.results.failed[f"{part}/{number}"] = why
        self.write()
        print(f"{part}/{number} FAILED {why}", flush=True)
        return "failed", part

    def write(self) -> None:
        """The JSON file as it is now."""
        self.results.seconds = time.monotonic() - self._began
        self.results.write()


class NoGpuError(Exception):
    """There is nothing to measure on."""


@contextmanager
def importable() -> Iterator[Path]:
    """A folder for PYTHONPATH where `import pagoda` finds this checkout, installed or not."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pagoda").symlink_to(REPOSITORY)
        yield Path(folder)


def best(numbers: dict[str, dict[str, dict]]) -> dict[str, dict]:
    """Of the stage tune: for each key of a table the fastest settings, and how much faster than those in use."""
    found: dict[str, dict] = {}
    usual: dict[str, float] = {}
    for trial in (each for part in numbers.values() for each in part.values() if "key" in each):
        if "us" in trial:
            usual.setdefault(trial["key"], trial["us"])  # the table's own is tried first
            if trial["us"] < found.get(trial["key"], {"us": float("inf")})["us"]:
                found[trial["key"]] = {name: trial[name] for name in ("us", "settings", "splits") if name in trial}
    return {key: chosen | {"of_usual": chosen["us"] / usual[key]} for key, chosen in found.items()}


def precompile(stage: str, environment: dict[str, str], until: float) -> float:
    """Compile the stage's kernels on all processors, for half of the time at most; the seconds that it took."""
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
    from pagoda.benchmarks.gpu.stages import STAGES

    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=tuple(STAGES))
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--carry", type=Path, help="folder that make gpu-carry built")
    parser.add_argument("--previous", type=Path, help="folder of an earlier run's JSON files")
    parser.add_argument(
        "--work", type=Path, help="folder for what is unpacked; kept (default: one in the temporary folder)"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds that the stage may take")
    parser.add_argument("--only", action="append", help="a part of the stage, such as gemm.checks")
    parser.add_argument("--model", type=Path, help="a GGUF file in place of the carried one")
    parser.add_argument("--commit", help="what the JSON says is measured (default: what make gpu-carry wrote down)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script, without kernels"
    )
    parser.add_argument("--precompile", action="store_true", help="compile by all processors first; tune always does")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--spoil", type=float, default=0.0, help="relative error added to results: every check must notice"
    )
    args = parser.parse_args()
    until = time.monotonic() + args.budget
    unknown = set(args.only or ()) - set(STAGES[args.stage])
    if unknown:
        parser.error(f"--only: {unknown.pop()} is not of {args.stage}; its parts are {', '.join(STAGES[args.stage])}")
    args.output.mkdir(parents=True, exist_ok=True)
    work = args.work or Path(tempfile.gettempdir()) / f"pagoda-gpu-{os.getuid()}"
    place = carried.unpack(args.carry, work)
    code = fingerprint(REPOSITORY)
    setting = {"tiny": args.tiny, "spoil": args.spoil}
    results = Results(args.output / f"{args.stage}.json", {"stage": args.stage, "code": code, **setting})
    results.take(results.path, *([args.previous / results.path.name] if args.previous else []))
    results.head |= {"commit": args.commit or place.commit, "parts": args.only or STAGES[args.stage]}
    before = carried.cache_entries(place.cache)
    paths = [*sys.path[:1], str(place.site), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TRITON_CACHE_DIR": str(place.cache),
        "TRITON_STORE_BINARY_ONLY": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if args.device == "cpu":
        environment["PAGODA_TORCH_CUDA_DEVICE"] = "cpu"
    if args.precompile or (args.stage == "tune" and args.device == "cuda"):
        results.head["precompile_s"] = precompile(args.stage, environment, until)
    stage = Stage(results, options(args, args.model or place.model), environment, work, until)
    try:
        results.complete = stage.run(tuple(args.only or STAGES[args.stage]))
    except NoGpuError:
        print("gpu.sh: no GPU is here; nothing was measured", file=sys.stderr)
        return NOTHING
    if args.stage == "tune":
        results.head["best"] = best(results.numbers)
    new = 0 if args.stage == "tune" else carried.keep_cache(place.cache, args.output / carried.KEPT_CACHE, before)
    results.head["carried"] = {"packages": place.unpacked, "cache_entries": len(before), "compiled": new}
    stage.write()
    return report(results)


def report(results: Results) -> int:
    """Print what came of it; the exit status."""
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
