"""Steps of a tiny model under NVIDIA's compute-sanitizer, which finds reads and writes outside of allocations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from pagoda.benchmarks.gpu.measure import Bench, Number

TOOLS = ("memcheck", "racecheck")
SECONDS = 240
ERRORS = 9
"""Exit status for errors that it finds."""

STEPS = """
from pagoda.benchmarks.gpu import engine
from pagoda.benchmarks.gpu.measure import Bench

tokens, running = engine._answers(Bench.on("cuda", tiny=True), max_num_batched_tokens=64)
assert all(tokens)
running.close()
"""


def checks(bench: Bench) -> Iterator[Number]:
    """Yield each of its tools."""
    for tool in TOOLS:
        yield Number(tool, partial(check, bench, tool), SECONDS)


def check(bench: Bench, tool: str) -> dict:
    """Return whether the engine's steps are free of errors; or that there is no sanitizer or GPU."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not bench.is_gpu:
        return {"absent": "compute-sanitizer is not installed" if bench.is_gpu else "no GPU"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS), sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS - 10)
    lines = (done.stdout + done.stderr).splitlines()
    return {"right": done.returncode == 0 and not bench.spoil, "status": done.returncode, "last": lines[-3:]}
