"""Environment and exit status of child processes."""

from __future__ import annotations

import os
import signal
import sys

from pagoda.common.errors import MEMORY_REMEDY


def child_env() -> dict[str, str]:
    """Return this process's environment with its import path, so that a child imports the same packages."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


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
