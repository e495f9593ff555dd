"""Programs of the command line: `works` makes a check of one command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import TaskFailed, check

HOME = Path(os.environ.get("PAGODA_HOME") or tempfile.mkdtemp(prefix="pagoda-client-"))
BIN = Path(sys.executable).parent


def works(name: str, *command: str, expect: str = "", task: str = "", limit: float = 1800, **variables: str) -> None:
    """Add a check that the command ends with 0 and prints `expect`, in a folder and with a home of its own.

    `task`: what it prints where the model failed, not the request.
    """

    def ran() -> str:
        home = {"HOME": str(HOME), "PWD": str(HOME)}  # opencode takes the folder of a project from PWD
        own = os.environ | home | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"} | variables
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=own, cwd=HOME, stdin=subprocess.DEVNULL
        )
        printed = done.stdout + done.stderr
        if task and task in printed:
            raise TaskFailed(printed[-300:])
        if done.returncode or expect not in " ".join(printed.split()) or not done.stdout.strip():
            raise RuntimeError(f"exit status {done.returncode}: {printed[-600:]}")
        return " ".join(done.stdout.split())[-90:]

    check(ran, name)
