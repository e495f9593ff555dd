"""Messages as bytes on a TCP connection between hosts: a length, then so many bytes."""

from __future__ import annotations

import socket
import time
from typing import Final

GREETING_BYTES: Final = 1 << 16
"""Largest message of somebody whom nobody knows yet."""

STEP_BYTES: Final = 1 << 30
"""Largest message between hosts that have met."""

_LENGTH_BYTES: Final = 8
_LEAST_SECONDS: Final = 0.001
_QUIET_SECONDS: Final = 5
_PROBES: Final = 3
_GONE_MS: Final = 20_000


def prepare(connection: socket.socket) -> None:
    """Send at once, and let the kernel notice within 20 s a host that vanished without a word (power, network)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _QUIET_SECONDS),
        ("TCP_KEEPINTVL", _QUIET_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _GONE_MS),
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Raises OSError."""
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive_frame(connection: socket.socket, limit: int, seconds: float | None = None) -> bytes:
    """The next frame, within so many seconds; None: whenever it comes.

    Raises EOFError at the end of the connection, OSError, or ValueError beyond `limit` bytes.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "big")
    if size > limit:
        raise ValueError(f"a message of {size} bytes, more than {limit}")
    return bytes(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(_LEAST_SECONDS, deadline - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended")
        view = view[count:]
    return data
