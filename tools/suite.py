"""Run the test suite: `make test` and the parts of `make test-full`.

    python tools/suite.py test              lint, types and the tests of `make test`; what CI runs
    python tools/suite.py full [PART ...]   the parts named, or all that are older than what they cover
    python tools/suite.py list              every part, when it passed last, whether it is older than what it covers

A part that passes is recorded in tests/data/full_suite.json with its commit, so that a run that was interrupted goes
on with the next part. It is not recorded while files that it covers have uncommitted changes. In `full` a skipped test
is a failure: what it needs is to be installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RECORDS: Final = ROOT / "tests" / "data" / "full_suite.json"
BIN: Final = Path(sys.executable).parent

JOBS: Final = os.environ.get("JOBS", "3")
"""Test processes."""

PYTEST: Final = (sys.executable, "-m", "pytest", "-n", JOBS, "--dist", "loadfile", "--no-loadscope-reorder")
"""Files of tests in the order of tests/conftest.py: by default those with most tests would start first."""

MYPY: Final = (
    *(str(BIN / "mypy"), "-p", "pagoda.common", "-p", "pagoda.backends"),
    *("-p", "pagoda.kernels_pallas", "-p", "pagoda.server"),
)

_USUAL: Final = "not tpu_matrix and not gpu_matrix and not slow_matrix"

ALL_BACKENDS: Final = ("common/", "backends/", "kernels_pallas/")


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that `make test` leaves out, run together by one command."""

    name: str
    covers: tuple[str, ...]
    """Files and folders whose change makes a run of this part out of date."""
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: without this variable


def _marked(name: str, covers: tuple[str, ...], marker: str, *paths: str, **environment: str) -> Part:
    """Return the part of the tests in `paths` that have a marker; one of all tests covers what they test alone."""
    covered = (*covers, *(path for path in paths if path != "tests"))
    return Part(name, covered, (*PYTEST, "-m", marker, *paths), environment)


def _unmarked(name: str, covers: tuple[str, ...], *paths: str, **environment: str) -> Part:
    """Return the part that repeats the tests of `make test` in `paths` in another environment."""
    return Part(name, (*covers, *paths), (*PYTEST, "-m", f"{_USUAL} and not program", *paths), environment)


def _tool(name: str, covers: tuple[str, ...], tool: str, *flags: str) -> Part:
    """Return the part that one of our tools runs. Those that run tests run them as `make test` does, with its skips."""
    return Part(name, (*covers, tool), (sys.executable, tool, *flags), {"PAGODA_TEST_FULL": None})


def _target(name: str, covers: tuple[str, ...], target: str) -> Part:
    return Part(name, covers, ("make", target))


_TORCH: Final = ("backends/cpu_kernels/", "backends/torch_decoder/", "backends/reference/")
_SERVER: Final = ("common/", "server/", *_TORCH)
_SERVER_TESTS: Final = ("tests/server", "tests/common", "tests/tools", "tests/benchmarks")

PARTS: Final = (
    _marked("models", ALL_BACKENDS, "slow_matrix", "tests/models"),
    _marked("backends", ALL_BACKENDS, "slow_matrix", "tests/backends", "tests/performance"),
    _marked("pallas", ("kernels_pallas/",), "slow_matrix", "tests/kernels_pallas"),
    _marked("server", (*_SERVER, "tools/", "benchmarks/"), "slow_matrix", *_SERVER_TESTS),
    _unmarked(
        "interpreters",  # every process with an interpreter of its own
        _SERVER,
        *("tests/server/cli", "tests/server/core_client", "tests/server/startup", "tests/server/processing"),
        PAGODA_TEST_FORK="0",
    ),
    _marked("properties", (*ALL_BACKENDS, "server/"), f"hypothesis and {_USUAL}", "tests", PAGODA_TEST_RANDOM="1"),
    _marked("programs", ("server/", "docs/", "benchmarks/"), "program", "tests"),
    _marked("tpu-compiler", ("kernels_pallas/", "backends/jax_tpu/", "benchmarks/tpu/aot/"), "tpu_matrix", "tests"),
    _marked("gpu-compiler", ("backends/torch_cuda/kernels/", "benchmarks/gpu/aot/"), "gpu_matrix", "tests"),
    _marked(
        "speculation",
        ALL_BACKENDS,
        "",
        "tests/backends/drafts/test_speculative_pairs.py",
        PAGODA_TEST_PAIRS="1000",
    ),
    _marked(
        "adapters",
        ALL_BACKENDS,
        "",
        "tests/server/lora/test_lora_rotation.py",
        PAGODA_TEST_ADAPTERS="200",
    ),
    _tool("fuzz-api", ("server/",), "tools/fuzz_api.py", "--serve", os.environ.get("PAGODA_TEST_MODEL", "")),
    _tool("fuzz-files", ("common/",), "tools/fuzz_files.py", "--cases", "20000"),
    _tool("mutants-engine", ("common/", "server/"), "tools/mutate.py", "--set", "engine"),
    _tool("mutants-breadth", (*ALL_BACKENDS, "server/"), "tools/mutate.py", "--set", "breadth"),
    _target("clients", ("server/", "tests/clients"), "test-clients"),
    _target("torchax", ("backends/jax_tpu/", "backends/fallback/"), "test-torchax"),
    _target("torch-xla", (*_TORCH, "backends/fallback/"), "test-torch-xla"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one command did."""

    status: int
    tests: int
    """Passed tests, 0 if the command does not say."""
    processor_seconds: float
    wall_seconds: float


def run(command: Sequence[str], environment: Mapping[str, str | None] | None = None) -> Run:
    """Run a command in the repository's root, copying its output, and measure it with its children.

    `environment`: variables in addition to this process's; those of None are left out.
    """
    begin, used = time.monotonic(), _children_seconds()
    tests = 0
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={name: value for name, value in {**os.environ, **(environment or {})}.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if summary := re.search(r"\b(\d+) passed\b", line):
            tests = int(summary[1])
    status = process.wait()
    return Run(status, tests, _children_seconds() - used, time.monotonic() - begin)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# `make test`


def test() -> int:
    """Run lint, then types beside the tests; return the exit status. The last line states what it took."""
    begin = time.monotonic()
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        if status := run((str(BIN / command[0]), *command[1:])).status:
            return status
    with tempfile.TemporaryFile("w+") as report:
        types = subprocess.Popen(MYPY, cwd=ROOT, stdout=report, stderr=subprocess.STDOUT)
        tests = run((*PYTEST, "--budgets", "--write-budgets=build/budgets.json"))
        types_status = types.wait()
        report.seek(0)
        print(report.read(), end="")
    for part, reason in stale():
        print(f"make test-full: {part.name} is to run: {reason}")
    outcome = "passed" if not (tests.status or types_status) else "FAILED"
    print(
        f"{outcome}: {tests.tests} tests passed, types {'do not hold' if types_status else 'hold'}, "
        f"{_children_seconds():.0f} s of processor time, {time.monotonic() - begin:.0f} s of wall time on {processor()}"
    )
    return tests.status or types_status


def processor() -> str:
    """Return the kind of processor and how many there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    kind = values.get("model name") or platform.processor() or platform.machine()
    family = f" (family {values['cpu family']}, model {values['model']})" if "cpu family" in values else ""
    return f"{os.cpu_count()} x {kind}{family}"


# `make test-full`


def records() -> dict[str, dict[str, object]]:
    """Return the record of the last run of each part that passed."""
    return dict(json.loads(RECORDS.read_text(encoding="utf-8"))) if RECORDS.is_file() else {}


def stale(parts: Sequence[Part] = PARTS) -> list[tuple[Part, str]]:
    """Return the parts that have not passed since a file that they cover was changed, each with the reason."""
    known = records()
    reasons = [(part, _reason(part, known.get(part.name))) for part in parts]
    return [(part, reason) for part, reason in reasons if reason]


def _reason(part: Part, record: Mapping[str, object] | None) -> str:
    if record is None:
        return "it has not passed yet"
    commit = str(record["commit"])
    changed = _git("diff", "--name-only", commit, "--", *part.covers)
    if changed is None:
        return f"it passed at {commit[:8]}, which is not in this checkout's history"
    count = len(changed.splitlines())
    return f"it passed at {commit[:8]}, since when {count} of its files were changed" if count else ""


def _git(*words: str) -> str | None:
    """Return what git prints; None if it fails."""
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def full(names: Sequence[str]) -> int:
    """Run the named parts, or those that are out of date; return the exit status of the first that fails."""
    unknown = sorted({*names} - {part.name for part in PARTS})
    if unknown:
        print(f"unknown parts: {', '.join(unknown)}; there are: {', '.join(part.name for part in PARTS)}")
        return 2
    chosen = [part for part in PARTS if part.name in names] if names else [part for part, _ in stale()]
    worst = 0
    for part in chosen:
        print(f"== {part.name}", flush=True)
        commit, dirty = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *part.covers)
        done = run(part.command, {"PAGODA_TEST_FULL": "1", **part.environment})
        print(f"== {part.name}: status {done.status}, {done.tests} tests, {done.processor_seconds:.0f} s, ", end="")
        if done.status:
            print("failed", flush=True)
        elif commit is None or dirty:
            print("passed, not recorded: there are uncommitted changes", flush=True)
        else:
            _record(part, commit, done)
            print("passed", flush=True)
        worst = worst or done.status
    return worst


def _record(part: Part, commit: str, done: Run) -> None:
    known = records()
    known[part.name] = {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "tests": done.tests,
        "processor_seconds": round(done.processor_seconds),
        "wall_seconds": round(done.wall_seconds),
        "processor": processor(),
    }
    RECORDS.write_text(f"{json.dumps(known, indent=1, sort_keys=True)}\n", encoding="utf-8")


def print_parts() -> int:
    """Print every part and its state."""
    known = records()
    reasons = {part.name: reason for part, reason in stale()}
    for part in PARTS:
        record = known.get(part.name)
        when = f"{record['date']}, {record['processor_seconds']} s" if record else "never"
        print(f"{part.name:16} {when:22} {reasons.get(part.name, 'up to date')}")
    return 0


def main() -> int:
    """Run what the arguments name; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("test", help="lint, types and the tests of make test")
    commands.add_parser("full", help="parts of make test-full").add_argument("parts", nargs="*", metavar="PART")
    commands.add_parser("list", help="the parts and their state")
    args = parser.parse_args()
    if args.command == "test":
        return test()
    return full(args.parts) if args.command == "full" else print_parts()


if __name__ == "__main__":
    sys.exit(main())
