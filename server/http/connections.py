"""Connections with limits: one event loop's accepting, and one connection's protocol.

The protocol is uvicorn's for httptools, which has no limits: its parser buffers a header of any size, and an idle
connection is never closed.
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
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.http.errors import HttpError
from pagoda.server.http.response import encode_json

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ready", "/ping"})
"""Paths of health probes. They are answered when the server has no room for other requests."""

TRANSPORT: Final = "pagoda.transport"
"""Scope key of the transport of a request's connection."""

MIN_BODY_RATE: Final = 1024
"""Minimum average rate of a body in bytes per second, after a grace period of --timeout-body."""

LINGER_SECONDS: Final = 2.0
"""How long input is discarded after an early response, so that the client can read the response."""

UNREAD_SECONDS: Final = 300.0
"""How long a response waits for a client that does not read."""

MAX_PIPELINED: Final = 64
"""Maximum number of requests of a connection queued behind an earlier one."""


class _Reading(Enum):
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # The connection is between requests.


class _RefusedError(Exception):
    """Raised in a parser callback to end the parsing."""


class Connections:
    """The open connections of a server, and those among them that wait for a request, longest first."""

    def __init__(self) -> None:
        self._opening: set[BoundedProtocol] = set()  # Connections without a transport yet, as during a TLS handshake.
        self._open: set[BoundedProtocol] = set()
        self._waiting: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_accepted(self) -> int:
        """Number of connections that are open or being opened."""
        return len(self._open) + len(self._opening)

    def accept(self, connection: BoundedProtocol) -> None:
        """Count a connection that is being opened, until `add` or `discard`."""
        self._opening.add(connection)

    def add(self, connection: BoundedProtocol) -> None:
        """Count an open connection."""
        self._opening.discard(connection)
        self._open.add(connection)

    def discard(self, connection: BoundedProtocol) -> None:
        """Forget a connection. Idempotent."""
        self._opening.discard(connection)
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def note(self, connection: BoundedProtocol, *, waits: bool) -> None:
        """Record whether an open connection waits for a request, or for the rest of its head."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest. Return False if none waits."""
        connection = next(iter(self._waiting), None)
        if connection is None:
            return False
        self.discard(connection)
        connection.transport.abort()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Requests that exceed a limit get 408, 431 or 503 unless a response has begun. With `only_probes`
    requests other than health probes get 503, because the server has no room for the connection.
    """

    def __init__(
        self, limits: ServerConfig, table: Connections, *args: Any, only_probes: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._table = table
        self._only_probes = only_probes
        self._reading = _Reading.HEAD
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began = self._body_moved = 0.0
        self._timer: TimerHandle | None = None
        self._timed: _Reading | None = None
        self._unread: TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._discards = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._table.add(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._table.discard(self)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data and check the size of the request head."""
        if self._discards:
            return
        if self._reading is _Reading.NOTHING:
            self._reading = _Reading.HEAD
            self._head_bytes = 0
        before = self._reading, self._body_bytes
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if before[0] is _Reading.BODY:  # These are trailers and chunk extensions.
            self._head_bytes = self._head_bytes + len(data) if (self._reading, self._body_bytes) == before else 0
        if self._head_bytes > self._limits.h11_max_incomplete_event_size:
            self._refuse(self._large_head())
        self._watch()

    def on_message_begin(self) -> None:
        """Start reading a request head."""
        super().on_message_begin()
        self._reading = _Reading.HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check the number of headers, and of trailers of a chunked body."""
        super().on_header(name, value)
        if len(self.headers) > self._limits.h11_max_header_count:
            limit = self._limits.h11_max_header_count
            self._refusal = HttpError(431, f"the request has more than {limit} headers (--h11-max-header-count)")
            raise _RefusedError

    def on_headers_complete(self) -> None:
        """Check the size of the head, then start reading the body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.h11_max_incomplete_event_size:
            self._refusal = self._large_head()
            raise _RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HttpError(503, f"more than {MAX_PIPELINED} requests are queued on this connection")
            raise _RefusedError
        if self._only_probes and self.url.partition(b"?")[0].decode("latin-1") not in self._probes:
            self._refusal = HttpError(
                503, "the server has too many connections (--max-connections, ulimit -n); try again"
            )
            raise _RefusedError
        self.scope[TRANSPORT] = self.transport  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._reading = _Reading.BODY
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began = self._body_moved = self.loop.time()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        self._body_moved = self.loop.time()

    def on_message_complete(self) -> None:
        """Start the keep-alive timer if the request was answered before it was complete."""
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        if self.cycle.response_complete and not self.transport.is_closing():
            self._stop_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Close the connection soon if the rest of the request has not been sent."""
        super().on_response_complete()
        if self._only_probes:
            self.transport.close()
        self._note_waiting()
        if self._reading is _Reading.BODY and not self._answering and not self.transport.is_closing():
            self._start_timer(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is invalid or that a callback refused."""
        self._refuse(self._refusal or HttpError(400, f"{msg.rstrip('.')}: the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer of a client that does not read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _large_head(self) -> HttpError:
        limit = self._limits.h11_max_incomplete_event_size
        return HttpError(431, f"the request head is larger than {limit} bytes (--h11-max-incomplete-event-size)")

    def cut(self) -> None:
        """Close the connection at once. A request in progress ends as if its client had disconnected."""
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()

    @property
    def _probes(self) -> frozenset[str]:
        return PROBES | {self._limits.prefix + path for path in PROBES}

    def _note_waiting(self) -> None:
        waits = self._reading is not _Reading.BODY and not self._answering and not self._discards
        self._table.note(self, waits=waits)

    def _watch(self) -> None:
        """Run a timer while a request is incomplete; most arrive complete and need none."""
        self._note_waiting()
        if self._discards or self.transport.is_closing() or self._reading is self._timed:
            return
        if self._reading is _Reading.HEAD:
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif self._reading is _Reading.BODY and self._answering:
            self._start_timer(self._limits.timeout_body, self._check_body, _Reading.BODY)
        elif self._reading is _Reading.NOTHING:
            self._stop_timer()

    def _head_is_late(self) -> None:
        if self._answering:  # These are trailing bytes after a request, as some clients send.
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif not self._head_bytes:
            self.transport.close()
        else:
            seconds = self._limits.timeout_headers
            self._refuse(HttpError(408, f"the request head took longer than {seconds:g} s (--timeout-headers)"))

    def _check_body(self) -> None:
        """Refuse a stalled or slow body. Time during which the server paused reading does not count."""
        now = self.loop.time()
        seconds = self._limits.timeout_body
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._body_began = now
            self._body_moved = now
            self._body_bytes = 0
        late = now - self._body_moved >= seconds
        if late or self._body_bytes < MIN_BODY_RATE * (now - self._body_began - seconds):
            why = f"stalled for {seconds:g} s" if late else f"is slower than {MIN_BODY_RATE} bytes per second"
            self._refuse(HttpError(408, f"the request body {why} (--timeout-body)"))
        else:
            self._start_timer(self._body_moved + seconds - now, self._check_body, _Reading.BODY)

    def _refuse(self, error: HttpError) -> None:
        """Close the connection, with an error response unless a response has begun."""
        if self._discards or self.transport.is_closing():
            return
        logger.debug("%s: %s", self.client, error.message)
        self._discards = True
        begun = False
        if self._answering:
            begun = self._reading is not _Reading.BODY or self.cycle.response_started or bool(self.pipeline)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.transport.close()
            return
        self._answer(error)
        self.flow.resume_reading()
        self._start_timer(LINGER_SECONDS, self.transport.close)

    def _answer(self, error: HttpError) -> None:
        body = encode_json(error.as_dict())
        head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def _start_timer(self, seconds: float, then: Callable[[], None], timed: _Reading | None = None) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(max(seconds, 0.05), then)
        self._timed = timed

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None


# Accepting connections, for one event loop, within the limits on connections and file descriptors.
#
# The event loop's own servers close nothing to make room, log every failed accept, and stop answering while the process
# is out of descriptors. Here the connection that has waited longest for a request gives way to a new one, a few
# descriptors are kept in reserve so that health probes are answered, and failures are logged once in a while.


class MakeProtocol(Protocol):
    """Makes the protocol of a connection that is being opened."""

    def __call__(self, *, only_probes: bool) -> BoundedProtocol:
        """Return the protocol. `only_probes`: see BoundedProtocol."""
        ...


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

_FLUSH_SECONDS: Final = 10.0  # Seconds for the closing notice of a TLS connection.


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
        self._last = now
        self._skipped = 0
        logger.warning("%s%s", message, more)


class Acceptor:
    """Accepts the connections of a listening socket in the running loop until it is closed. `limit`: how many may be
    open; `at_once`: how many are accepted before other events, fewer where several processes share the socket; `tls`:
    returns the context of a connection that opens now.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: MakeProtocol,
        connections: Connections,
        *,
        limit: int,
        handshake_seconds: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
        at_once: int = ACCEPTED_AT_ONCE,
    ) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._limit = limit
        self._tls = tls
        self._at_once = at_once
        self._handshake_seconds = handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
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
        beyond = self._connections.num_accepted - self._limit
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
            pass  # It is tried again with the next connection.

    def _open(self, connection: socket.socket, *, only_probes: bool) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = self._make(only_probes=only_probes)
        self._connections.accept(protocol)
        task = self._loop.create_task(self._connect(connection, protocol))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        """Hand the connection to its protocol, after the TLS handshake if there is one."""
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._tls(),
                    ssl_handshake_timeout=self._handshake_seconds,
                    ssl_shutdown_timeout=_FLUSH_SECONDS,
                )
        except BaseException as error:
            self._connections.discard(protocol)
            connection.close()
            if not isinstance(error, OSError):
                raise
            logger.debug("a connection was not opened: %s", error)
