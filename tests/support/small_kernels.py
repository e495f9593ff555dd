"""The TPU compiler for the tests of the smaller kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "kernel_aot.py"


def compile_for_tpu(triples: list[str]) -> list[dict]:
    """Facts of each `chip/kernel/shape`; a process of its own, for libtpu reads the environment when it is loaded."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *triples], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [facts["pair"] for facts in found] == triples
    return found
