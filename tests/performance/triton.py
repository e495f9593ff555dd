"""Resources of Triton kernels on sm_90: of those that kernels/frame/test_aot.py compiles, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

PROGRAM = "pagoda.benchmarks.gpu.aot.compile"


def environment() -> dict[str, str]:
    """The compiler's version."""
    return {"triton": metadata.version("triton")}


def measure() -> Mapping[str, float]:
    """Registers and spilled bytes per thread, shared memory per program. In a process without the interpreter."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", PROGRAM, "--chip", "sm_90", "--most", "2"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    built = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"{one['name']}: {what}": one[what] for one in built for what in ("registers", "shared", "spilled")}
