"""Processes that do not answer, and the numbers that they leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pagoda.benchmarks.gpu import run
from pagoda.benchmarks.gpu.run import Results, Stage

PART = """
import json, os, sys, time
print(json.dumps({"machine": {"device": "cpu", "gpu": None}}), flush=True)
alone = True
left_out = json.loads(sys.stdin.readline())["leave_out"]
print(json.dumps({"part": "p"}), flush=True)
for name in ("good", "crowded", "hangs", "dies", "last"):
    if f"p/{name}" in left_out:
        continue
    print(json.dumps({"begin": name, "seconds": 1}), flush=True)
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        print("CUDA error: an illegal memory access", file=sys.stderr)
        os._exit(134)
    if name == "crowded" and not alone:
        print(json.dumps({"error": "no memory"}), flush=True)
        sys.exit(70)
    alone = False
    print(json.dumps({"result": {"right": True}}), flush=True)
print(json.dumps({"done": True}), flush=True)
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
    return Stage(results, [], {}, tmp_path, time.monotonic() + 30)


def test_numbers_after_a_failure_are_measured(stage: Stage) -> None:
    began = time.monotonic()
    assert stage.run(("p",))
    assert time.monotonic() - began < 20
    assert stage.results.numbers == {"p": {name: {"right": True} for name in ("good", "crowded", "last")}}
    assert list(stage.results.failed) == ["p/hangs", "p/dies"]
    assert "timed out" in stage.results.failed["p/hangs"]
    assert "exit status 134\nCUDA error: an illegal memory access" in stage.results.failed["p/dies"]
    assert run.report(stage.results) == run.WRONG


def test_the_stage_ends_in_time(stage: Stage) -> None:
    stage.until = time.monotonic() + 5.3
    assert not stage.run(("p",))
    assert time.monotonic() < stage.until + 1
    assert "good" in stage.results.numbers["p"]
