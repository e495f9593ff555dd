"""The TPU compiler for the tests of kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.suite.fork_server import FreshPopen

PROGRAM = Path(__file__).parent / "kernel_aot.py"


def compile_for_tpu(triples: list[str]) -> list[dict]:
    """Return facts of each `chip/kernel/shape`, or of `chip/shape` of attention.

    A process of its own, for libtpu reads the environment when it is loaded.
    """
    words, environment = [sys.executable, str(PROGRAM), *triples], os.environ | {"JAX_PLATFORMS": "cpu"}
    with FreshPopen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        output, errors = program.communicate(timeout=1800)
    assert program.returncode == 0, errors[-3000:]
    found: list[dict] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [facts["pair"] for facts in found] == triples
    return found
