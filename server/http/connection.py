"""HTTP connections of strangers: bounded in what their heads may hold and in how long they may take.

uvicorn's protocol for httptools bounds neither: its parser keeps a header of any size, and a silent connection stays
for ever. Knows uvicorn's protocol. Does not know what is asked or answered.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.http.fields.errors import HttpError
from pagoda.server.http.response import encode_json

LEAST_RATE: Final = 1024
"""Bytes a second that a body must come in at, on average after the time that it may stand still."""

LINGER_SECONDS: Final = 2.0
"""How long what a client still sends is thrown away after an early answer, so that it can read the answer."""

UNREAD_SECONDS: Final = 300.0
"""How long an answer may wait for a client that reads nothing of it."""

MAX_PIPELINED: Final = 64
"""Most requests of a connection that wait for the answer to an earlier one."""

logger = logging.getLogger(__name__)


class _Reading(Enum):
    """What comes next on a connection."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # the last request is whole, the next has not begun


class _RefusedError(Exception):
    """Raised within the parser's callbacks, which ends the parsing."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Requests that exceed a bound are answered 408, 431 or 503 where no answer has begun."""

    def __init__(self, limits: ServerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
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
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._discards = True
            self._answer(HttpError(503, "the server has too many connections (--max-connections); try again"))
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._discards:
            return
        if self._reading is _Reading.NOTHING:
            self._reading, self._head_bytes = _Reading.HEAD, 0
        before = self._reading, self._body_bytes
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if before[0] is _Reading.BODY:  # trailers, and what may be said beside the size of a chunk
            self._head_bytes = self._head_bytes + len(data) if (self._reading, self._body_bytes) == before else 0
        if self._head_bytes > self._limits.h11_max_incomplete_event_size:
            self._refuse(self._large_head())
        self._watch()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._reading = _Reading.HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of a request, or a trailer of a chunked body."""
        super().on_header(name, value)
        if len(self.headers) > self._limits.h11_max_header_count:
            most = self._limits.h11_max_header_count
            self._refusal = HttpError(431, f"the request has more than {most} headers (--h11-max-header-count)")
            raise _RefusedError

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.h11_max_incomplete_event_size:
            self._refusal = self._large_head()
            raise _RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HttpError(503, f"more than {MAX_PIPELINED} requests wait on this connection")
            raise _RefusedError
        super().on_headers_complete()
        self._reading, self._head_bytes, self._body_bytes = _Reading.BODY, 0, 0
        self._body_began = self._body_moved = self.loop.time()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        super().on_body(body)
        self._body_bytes += len(body)
        self._body_moved = self.loop.time()

    def on_message_complete(self) -> None:
        """A request is whole."""
        super().on_message_complete()
        self._reading, self._head_bytes = _Reading.NOTHING, 0
        if self.cycle.response_complete and not self.transport.is_closing():  # it was answered before it was whole
            self._stop_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        if self._reading is _Reading.BODY and not self._answering and not self.transport.is_closing():
            self._start_timer(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not understand, or a callback refused."""
        self._refuse(self._refusal or HttpError(400, f"{msg.rstrip('.')}: it is not HTTP/1.1"))

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _large_head(self) -> HttpError:
        most = self._limits.h11_max_incomplete_event_size
        return HttpError(431, f"the request's head is larger than {most} bytes (--h11-max-incomplete-event-size)")

    def _watch(self) -> None:
        """Have a timer while a request is incomplete; one that came whole, as most do, needs none."""
        if self._discards or self.transport.is_closing() or self._reading is self._timed:
            return
        if self._reading is _Reading.HEAD:
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif self._reading is _Reading.BODY and self._answering:
            self._start_timer(self._limits.timeout_body, self._check_body, _Reading.BODY)
        elif self._reading is _Reading.NOTHING:
            self._stop_timer()

    def _head_is_late(self) -> None:
        if self._answering:  # bytes behind a request, as some clients send
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif not self._head_bytes:
            self.transport.close()
        else:
            seconds = self._limits.timeout_headers
            self._refuse(HttpError(408, f"the request's head took longer than {seconds:g} s (--timeout-headers)"))

    def _check_body(self) -> None:
        """Refuse a body that stalls or is too slow; time during which this server paused reading does not count."""
        now, seconds = self.loop.time(), self._limits.timeout_body
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._body_began, self._body_moved, self._body_bytes = now, now, 0
        late = now - self._body_moved >= seconds
        if late or self._body_bytes < LEAST_RATE * (now - self._body_began - seconds):
            why = f"stood still for {seconds:g} s" if late else f"came at less than {LEAST_RATE} bytes a second"
            self._refuse(HttpError(408, f"the request's body {why} (--timeout-body)"))
        else:
            self._start_timer(self._body_moved + seconds - now, self._check_body, _Reading.BODY)

    def _refuse(self, error: HttpError) -> None:
        """End the connection: with an answer, unless one has begun."""
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
        self._timer, self._timed = self.loop.call_later(max(seconds, 0.05), then), timed

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None
