"""A loopback address that only this process uses: its ports are free, so that a program can be told one to listen at.

For programs that cannot listen at port 0 and say which port they got. Give them the address, too: a port at the usual
127.0.0.1, or at all addresses, may be anybody's.
"""

from __future__ import annotations

import itertools
import os
from typing import Final

OWN_ADDRESS: Final = f"127.{64 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""A process id has at most 22 bits on Linux."""

_ports = itertools.count(20_000, 2)  # below those that the kernel gives away


def own_port() -> int:
    """A port of OWN_ADDRESS that this process has not used yet. The one that follows is free, too."""
    return next(_ports)
