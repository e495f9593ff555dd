"""A stage of what a GPU has to show; called by gpu.sh.

usage: gpu.sh --output DIR [--carry DIR] [--previous DIR] [--budget SECONDS] [--only PART] STAGE

STAGE is smoke, decode, prefill, throughput, peers, kernels or tune. `DIR/STAGE.json` is written after every number. Numbers
that the same code has on the same machine, there or in the folder of --previous, are not measured again, so a stage that was
cut off goes on where it was. Needs no network and no git; Python packages that the machine lacks come from --carry.

exit status: 0 all measured and right; 1 something is wrong or failed; 2 nothing can be measured; 3 the time is over, run the
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG, NOTHING, UNFINISHED = 1, 2, 3
BUDGET = 470.0
"""Seconds of a stage, which leaves 10 of 8 minutes for its end."""
LEAST = 5.0
"""Seconds below which no number is begun."""
CRASHES = 3
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


class Part:
    """A running process of part.py: its lines, until a second of time.monotonic. Ends with its group of processes."""

    def __init__(self, name: str, options: list[str], environment: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "pagoda.benchmarks.gpu.part", name, *options]
        self.log, self._errors, self._buffer = log, log.open("wb"), b""
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
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as its lines will say

    def line(self, until: float) -> dict[str, Any] | None:
        """The next line, or None at its end. Raises TimeoutError."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not self._ready.select(left):
                raise TimeoutError
            if not (more := self._process.stdout.read()):
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> int:
        """Its exit status; what still runs is killed."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL) if self._process.poll() is None else None
        except ProcessLookupError:
            pass
        self._ready.close()
        self._errors.close()
        return self._process.wait()

    def wait(self) -> int:
        """Its exit status, for which it is given some seconds after its last line."""
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        return self.end()

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
        self._began = time.monotonic()

    def run(self, parts: tuple[str, ...]) -> bool:
        """True when every number has been measured or has failed."""
        return all([self._part(name) for name in parts])

    def _part(self, name: str) -> bool:
        crashes = 0
        tried: set[str] = set()
        while crashes < CRASHES:
            if self.until - time.monotonic() < LEAST:
                return False
            before = len(self.results.numbers.get(name, {}))
            outcome = self._process(name, tried)
            if outcome != "failed":
                return outcome == "done"
            crashes = 1 if len(self.results.numbers.get(name, {})) > before else crashes + 1
        print(f"{name}: given up after {CRASHES} failures", flush=True)
        return True

    def _process(self, name: str, tried: set[str]) -> str:
        """`done`, `unfinished`, or `failed` where one number was and others may be left."""
        part = Part(name, self._options, self._environment, self._logs / f"{name}.log")
        running, limit = "", self.until
        try:
            while (line := part.line(min(limit, self.until))) is not None:
                if "machine" in line:
                    self.results.on(line["machine"])
                    if line["machine"]["device"] == "cuda" and line["machine"]["gpu"] is None:
                        raise NoGpu
                    known = [*self.results.numbers.get(name, {}), *tried]
                    part.ask(leave_out=known, until=self.until - LEAST)
                elif "begin" in line:
                    running, limit = line["begin"], time.monotonic() + line["seconds"]
                elif "error" in line:
                    part.wait()
                    return self._failed(name, running, tried, line["error"])
                elif "found" in line:
                    self._found(name, line["name"], line["found"])
                    running, limit = "", self.until
                else:
                    part.wait()
                    return "done"
        except TimeoutError:
            part.end()
            if time.monotonic() >= self.until:
                return "unfinished"
            return self._failed(name, running, tried, f"took longer than it may\n{part.tail()}")
        except BaseException:
            part.end()
            raise
        status = part.wait()
        if status == 0:
            return "unfinished"
        return self._failed(name, running or "start", tried, f"exit status {status}\n{part.tail()}")

    def _found(self, part: str, name: str, found: dict) -> None:
        self.results.numbers.setdefault(part, {})[name] = found
        self.results.failed.pop(f"{part}/{name}", None)
        self._write()
        print(f"{part}/{name} {json.dumps(found)[:600]}", flush=True)

    def _failed(self, part: str, name: str, tried: set[str], why: str) -> str:
        tried.add(name)
        self.results.failed[f"{part}/{name}"] = why
        self._write()
        print(f"{part}/{name} FAILED {why}", flush=True)
        return "failed"

    def _write(self) -> None:
        self.results.seconds = time.monotonic() - self._began
        self.results.write()


class NoGpu(Exception):
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
    stage = Stage(results, options(args, args.model or place.model), environment, work, until)
    try:
        results.complete = stage.run(tuple(args.only or STAGES[args.stage]))
    except NoGpu:
        print("gpu.sh: no GPU is here; nothing was measured", file=sys.stderr)
        return NOTHING
    if args.stage == "tune":
        results.head["best"] = best(results.numbers)
    new = carried.keep_cache(place.cache, args.output / carried.KEPT_CACHE, before)
    results.head["carried"] = {"packages": place.unpacked, "cache_entries": len(before), "compiled": new}
    stage._write()
    return report(results)


def report(results: Results) -> int:
    """Print what came of it; the exit status."""
    count = sum(map(len, results.numbers.values()))
    print(
        f"{results.path}: {count} numbers, {len(results.wrong)} wrong, {len(results.failed)} failed, {results.seconds:.0f} s"
    )
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
