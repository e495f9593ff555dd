"""Accepts connections for one event loop, within the limits on connections and file descriptors.

The event loop's own servers close nothing to make room, log every failed accept, and stop answering while the process
is out of descriptors. Here the connection that has waited longest for a request gives way to a new one, a few
descriptors are kept in reserve so that health probes are answered, and failures are logged once in a while.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.http.connections import BoundedProtocol, Connections

logger = logging.getLogger(__name__)

RESERVE: Final = 16
"""Descriptors kept for connections that are accepted when the process has no other left."""

OTHER_DESCRIPTORS: Final = 256
"""Descriptors left for everything but connections: sockets of the engine, files, processes."""

LOG_SECONDS: Final = 10.0
"""Minimum time between two log lines of one kind."""

RETRY_SECONDS: Final = 0.1
"""Pause after an accept that failed with the reserve used up."""

ACCEPTED_AT_ONCE: Final = 64
"""Maximum connections accepted before the event loop handles other events."""

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_FLUSH_SECONDS: Final = 10.0  # closing notice of a TLS connection

MakeProtocol = Callable[[bool], BoundedProtocol]
"""Makes the protocol of a connection; the argument: it answers health probes only."""


def raise_descriptor_limit(connections: int) -> None:
    """Raise the soft limit of open files as far as `connections` need, and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVE + OTHER_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def max_connections(config: ServerConfig) -> int:
    """Return --max-connections, or fewer if the limit of open files has no room for them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    room = max(soft - RESERVE - OTHER_DESCRIPTORS, soft // 2)
    if room < config.max_connections:
        logger.warning(
            "at most %d connections are served, not %d (--max-connections): the limit of open files is %d (ulimit -n)",
            *(room, config.max_connections, soft),
        )
    return min(room, config.max_connections)


class LimitedLog:
    """Logs a warning at most once in LOG_SECONDS, with the number of those in between."""

    def __init__(self) -> None:
        self._last = -LOG_SECONDS
        self._skipped = 0

    def warn(self, message: str) -> None:
        """Log, or count."""
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            self._skipped += 1
            return
        more = f" ({self._skipped} more since the last line)" if self._skipped else ""
        self._last, self._skipped = now, 0
        logger.warning("%s%s", message, more)


class Acceptor:
    """Accepts the connections of a listening socket in the running loop until it is closed. `limit`: how many may be
    open; `at_once`: how many are accepted before other events, fewer where several processes share the socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: MakeProtocol,
        connections: Connections,
        *,
        limit: int,
        handshake_seconds: float,
        tls: ssl.SSLContext | None = None,
        at_once: int = ACCEPTED_AT_ONCE,
    ) -> None:
        self._listener, self._make, self._connections = listener, make, connections
        self._limit, self._tls, self._at_once = limit, tls, at_once
        self._handshake_seconds = handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()  # connections without a protocol yet, as during a TLS handshake
        self._reserve: list[int] = []
        self._log = LimitedLog()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._refill()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections, and free the reserve. Those that are open stay open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()
        while self._reserve:
            os.close(self._reserve.pop())

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._accept_from_reserve(error):
                    return
            else:
                self._admit(connection)
        if len(self._reserve) < RESERVE:
            self._refill()

    def _admit(self, connection: socket.socket) -> None:
        """Open the connection, in place of the one that has waited longest if there are too many. Where all are busy it
        gets probes answered only, and beyond RESERVE of those it is closed.
        """
        beyond = len(self._connections) + len(self._opening) - self._limit
        if beyond < 0 or self._connections.close_longest_waiting():
            self._open(connection, only_probes=False)
        elif beyond < RESERVE:
            self._open(connection, only_probes=True)
        else:
            self._log.warn(f"connections are refused: all {self._limit} are busy (--max-connections)")
            connection.close()

    def _accept_from_reserve(self, error: OSError) -> bool:
        """Accept a connection for which descriptors are short. Return whether to go on accepting."""
        self._log.warn(f"cannot accept connections: {error.strerror}; raise the limit of open files (ulimit -n)")
        self._connections.close_longest_waiting()
        if error.errno in _SHORTAGES and self._reserve:
            os.close(self._reserve.pop())
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return False
            self._open(connection, only_probes=True)
            return True
        self._pause()
        return False

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._refill()
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _refill(self) -> None:
        try:
            while len(self._reserve) < RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # tried again with the next connection

    def _open(self, connection: socket.socket, *, only_probes: bool) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connection, only_probes))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, only_probes: bool) -> None:
        """Hand the connection to a protocol, after the TLS handshake if there is one."""
        handshake = (
            {}
            if self._tls is None
            else {"ssl_handshake_timeout": self._handshake_seconds, "ssl_shutdown_timeout": _FLUSH_SECONDS}
        )
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(only_probes), connection, ssl=self._tls, **handshake
            )
        except (OSError, ConnectionError, TimeoutError) as error:
            logger.debug("a connection was not opened: %s", error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
