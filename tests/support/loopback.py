"""Places to listen for programs that must be told their port before they bind it."""

from __future__ import annotations

import itertools
import os
from typing import Final

FIRST_PORT: Final = 20_000
"""The system takes ports of outgoing connections from 32,768 on."""

_numbers = itertools.count()


def own_address() -> str:
    """Return an address of the loopback network that belongs to this process alone, made of its process id."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


def own_port() -> int:
    """Return a port of `own_address` of which nobody knows yet, and the next one either."""
    return FIRST_PORT + 2 * (next(_numbers) % 6_000)
