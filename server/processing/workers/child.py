"""Environment and exit status of child processes."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from pagoda.common.errors import MEMORY_REMEDY

_PATHS: Final = ("PATH", "LD_LIBRARY_PATH")
"""What a child needs to find its interpreter and libraries."""


def child_env() -> dict[str, str]:
    """Return this process's environment with its import path, so that a child imports the same packages."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def untrusted_env() -> dict[str, str]:
    """Return the environment of a child that works on clients' text: only where its programs and packages are.

    The server's environment has API keys and tokens of model hubs, which such a child must not be able to read.
    """
    kept = {name: os.environ[name] for name in _PATHS if name in os.environ}
    return kept | {"PYTHONPATH": child_env()["PYTHONPATH"]}


def engine_env() -> dict[str, str]:
    """Return `child_env` with one arena of the C library's heap, unless the environment sets their number.

    Each thread of a step would else keep what it frees in an arena of its own: hundreds of megabytes of tensors.
    """
    return {"MALLOC_ARENA_MAX": "1"} | child_env()


def describe_exit(status: int) -> str:
    """Describe an exit status as subprocess gives it: `was killed by SIGTERM`."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{f': out of memory? Then {MEMORY_REMEDY}' if name == 'SIGKILL' else ''}"
