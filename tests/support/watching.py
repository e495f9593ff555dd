"""Waiting for what happens elsewhere, and reading what is logged there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in ten seconds"
        time.sleep(0.01)


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
