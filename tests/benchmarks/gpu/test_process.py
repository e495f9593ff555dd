"""Processes that do not answer, and the numbers that they leave."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pagoda.benchmarks.gpu import run
from pagoda.benchmarks.gpu.run import Results, Stage

PART = """
import json, os, signal, sys

def write(**line):
    print(json.dumps(line), flush=True)

write(machine={"device": "cpu", "gpu": None})
alone = True
left_out = json.loads(sys.stdin.readline())["leave_out"]
write(part="p")
for name in ("good", "crowded", "hangs", "dies", "last"):
    if f"p/{name}" in left_out:
        continue
    write(begin=name, seconds=0.1 if name == "hangs" else 60)
    if name == "hangs":
        signal.pause()
    if name == "dies":
        print("CUDA error: an illegal memory access", file=sys.stderr)
        os._exit(134)
    if name == "crowded" and not alone:
        write(error="no memory")
        sys.exit(70)
    alone = False
    write(result={"right": True, "took_s": 0.1})
write(done=True)
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Its part hangs in one number and dies in another."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {run.sys.executable} {tmp_path / 'part.py'}\n")
    script.chmod(0o755)
    (tmp_path / "part.py").write_text(PART)
    monkeypatch.setattr(run.sys, "executable", str(script))
    results = Results(tmp_path / "out.json", {"stage": "s"})
    return Stage(results, [], {}, tmp_path, time.monotonic() + 600)


def test_numbers_after_a_failure_are_measured(stage: Stage) -> None:
    assert stage.run(("p",))
    assert stage.results.numbers == {
        "p": {name: {"right": True, "took_s": 0.1} for name in ("good", "crowded", "last")}
    }
    assert list(stage.results.failed) == ["p/hangs", "p/dies"]
    assert "timed out" in stage.results.failed["p/hangs"]
    assert "exit status 134\nCUDA error: an illegal memory access" in stage.results.failed["p/dies"]
    assert run.report(stage.results) == run.WRONG


@pytest.mark.parametrize(
    ("seconds", "measured"),
    [
        (96.0, ["good"]),  # too little is left for a number
        (101.0, ["good"]),  # nothing is left
        (94.0, ["good", "crowded", "last"]),
    ],
)
def test_the_stage_ends_in_time(stage: Stage, tmp_path: Path, seconds: float, measured: list[str]) -> None:
    """Its 100 seconds pass while the first number is measured."""

    def clock() -> float:
        return seconds if stage.results.numbers else 0.0

    timed = Stage(stage.results, [], {}, tmp_path, 100.0, clock)
    assert timed.run(("p",)) == (seconds == 94.0)
    assert list(stage.results.numbers["p"]) == measured
    assert stage.results.seconds == seconds


def test_every_number_is_stored_before_the_next_begins(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[list[str]] = []
    write = stage.results.write

    def spied() -> None:
        write()
        stored.append(list(json.loads(stage.results.path.read_text())["numbers"].get("p", {})))

    monkeypatch.setattr(stage.results, "write", spied)
    assert stage.run(("p",))
    counts = [len(each) for each in stored]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}
