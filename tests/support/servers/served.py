"""`pagoda serve` as a process, over a fake engine (see fake_engine) unless told otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.suite import xla_flags

TESTS = Path(__file__).resolve().parents[2]
FAKE = (str(TESTS / "support" / "servers" / "fake_serve.py"),)
REAL = ("-m", "pagoda.server.cli.main", "serve")


def environment() -> dict[str, str]:
    """This process's, in which a child finds what this process finds, but one XLA device and programs compiled fast."""
    own = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    paths = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
    return xla_flags.ENVIRONMENT | own | {"PYTHONPATH": paths}


@contextmanager
def served(
    model: str, *flags: str, program: tuple[str, ...] = FAKE, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, first of a group of its own, and its address from its log. `variables`: more of its environment."""
    words = [sys.executable, *program, model, "--port", "0", *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment() | variables, process_group=0)
    try:
        assert process.stderr is not None
        url = ""
        while not (found := re.search(r"listening on (http://[\d.:]+)", url)):
            url = process.stderr.readline()
            assert url, "it ended before it listened"
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[str]) -> None:
    """Read the log until the model is warm."""
    wait_for(process, "ready after")


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read the log up to a line with this text."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, f"it ended before it wrote {text!r}"
