"""Ports for servers that cannot say which one they got."""

from __future__ import annotations

import socket


def two_free_ports() -> int:
    """The first of two ports in a row that nobody uses."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
