"""Waiting for what happens elsewhere, and reading what is logged there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in ten seconds"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Wait for a process that is no child of ours to end; False when it does not in twenty seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def children() -> list[int]:
    """Processes that this one has started and not yet seen the end of."""
    listed = [(task / "children").read_text().split() for task in Path("/proc/self/task").iterdir()]
    return sorted(int(child) for found in listed for child in found)


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, name: str) -> Iterator[None]:
    """What a logger says, once, also when it does not pass it on."""
    caplog.set_level("INFO", name)
    logger = logging.getLogger(name)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
        logger.propagate = before
