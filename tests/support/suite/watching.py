"""Waiting for what happens elsewhere, and reading what is logged there."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from support.suite.fork_server import SERVER_NAME

PATIENCE: Final = 120.0
"""Seconds after which something that should happen is given up, on the busiest machine; nothing takes so long."""


def eventually(condition: Callable[[], Any], then: Callable[[], object] = lambda: None) -> Any:
    """Return what the condition returns once that is true. `then`: called between two looks, to repeat a step."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen in {PATIENCE:g} s"
        then()
        time.sleep(0.005)
    return value


async def until(condition: Callable[[], object], then: Callable[[], object] = lambda: None) -> None:
    """`eventually`, while the event loop runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {PATIENCE:g} s"
        then()
        await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    """Wait for a process that is no child of ours to end; False when it does not."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if has_ended(pid):
            return True
        time.sleep(0.01)
    return False


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or waits for its parent to see its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def variables_of(pid: int) -> list[bytes]:
    """Return the environment that a process was started with, as `NAME=value`."""
    return _of_program(pid, "environ").split(b"\0")


def _of_program(pid: int, name: str) -> bytes:
    """Return a file in /proc that is empty from the call that starts a program until the program is loaded.

    `subprocess.Popen` returns as soon as that call has succeeded. Raises FileNotFoundError, ProcessLookupError.
    """
    path = Path(f"/proc/{pid}/{name}")
    eventually(lambda: path.read_bytes() or has_ended(pid))
    return path.read_bytes()


def children() -> list[int]:
    """Processes that this one has started and not yet seen the end of; of other tests, too."""
    return sorted(programs(os.getpid()))


def programs(parent: int) -> dict[int, str]:
    """The processes that a process has started, except its fork server, and how each is named or was started."""
    listed: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            listed += map(int, (task / "children").read_text().split())
    found: dict[int, str] = {}
    for pid in listed:
        with suppress(FileNotFoundError, ProcessLookupError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            words = _of_program(pid, "cmdline").replace(b"\0", b" ").decode()
            is_starting = "fork_server.py" in words and name.startswith("python")  # it has no name of its own yet
            if name != SERVER_NAME and not is_starting:
                found[pid] = f"{name} {words}"
    return found


class Children:
    """Those that came after it was made."""

    def __init__(self) -> None:
        self._before = frozenset(children())

    def __call__(self) -> list[int]:
        return [child for child in children() if child not in self._before]


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
