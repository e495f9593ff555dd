"""One measured request: a POST whose answer is timed when its bytes arrive, not when they are parsed."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from pagoda.server.bench.online.metrics import Outcome
from pagoda.server.cli.client.http_client import ApiError, message_of

REQUEST_SECONDS: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of an answer says."""

    counts: bool = False  # It has output, so its arrival is timed.
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    is_last: bool = False  # The answer is complete, whatever follows.


ReadPiece = Callable[[Mapping[str, Any]], Piece]
"""Interprets an event of a streamed answer, or a whole answer that is not streamed."""


@dataclass(slots=True)
class Endpoint:
    """The endpoint under load. Connections are kept and used again, from one event loop."""

    url: str  # URL with the path.
    headers: Mapping[str, str]
    read: ReadPiece
    streamed: bool = True
    insecure: bool = False
    _idle: list[_Exchange] = field(default_factory=list)

    async def measure(
        self,
        body: Mapping[str, Any],
        prompt_tokens: int = 0,
        *,
        headers: Mapping[str, str] | None = None,
        sequences: int = 1,
    ) -> Outcome:
        """Send one request and time its answer. Errors are in the outcome.

        `prompt_tokens` is used if the answer has no usage. `headers`: further ones.
        """
        outcome = Outcome(start=time.perf_counter(), prompt_tokens=prompt_tokens, sequences=sequences)
        try:
            async with asyncio.timeout(REQUEST_SECONDS), aclosing(self._pieces(body, headers or {})) as pieces:
                async for arrival, piece in pieces:
                    _record(outcome, arrival, piece)
            if not outcome.end:
                raise ApiError("the answer is empty")
        except (ApiError, OSError, ValueError, TimeoutError, httptools.HttpParserError) as error:
            outcome.error = str(getattr(error, "strerror", None) or error) or type(error).__name__
        return outcome

    def close(self) -> None:
        """Close the kept connections."""
        for exchange in self._idle:
            exchange.close()
        self._idle.clear()

    async def _pieces(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[float, Piece], None]:
        """Yield (arrival time, piece) up to the last. Raises ApiError, also for an error event."""
        raw = json.dumps(body).encode()
        if not self.streamed:
            chunks = [chunk async for chunk in self._chunks(raw, headers)]
            answer = json.loads(b"".join(chunk for _, chunk in chunks))
            yield (chunks[-1][0], self.read(answer)) if isinstance(answer, dict) else (0.0, Piece())
            return
        tail = b""
        complete = False
        async with aclosing(self._chunks(raw, headers)) as arriving:
            async for arrival, chunk in arriving:
                *events, tail = (tail + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
                for data in filter(None, map(_data, events)):
                    if data == b"[DONE]":
                        complete = True
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise ApiError(message_of(data))
                    piece = self.read(event)
                    complete = complete or piece.is_last
                    yield arrival, piece
        if not complete:
            raise ApiError("the answer ended early")

    async def _chunks(self, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yield the body of the answer with arrival times. A kept connection that the server closed is replaced."""
        parts = urlsplit(self.url)
        path = parts.path or "/"
        head = [f"POST {path}?{parts.query} HTTP/1.1" if parts.query else f"POST {path} HTTP/1.1"]
        fields = {
            "host": parts.netloc.rpartition("@")[2],
            "content-type": "application/json",
            **{name.lower(): value for name, value in {**self.headers, **headers}.items()},
            "content-length": str(len(body)),
        }
        head += [*(f"{name}: {value}" for name, value in fields.items()), "", ""]
        message = "\r\n".join(head).encode("latin-1") + body
        while True:
            exchange, kept = await self._connection()
            exchange.send(message)
            try:
                first = await exchange.arrivals.get()
                if first is None and kept and exchange.is_unanswered:
                    continue
                while first is not None:
                    yield first
                    first = await exchange.arrivals.get()
                exchange.check()
            finally:
                self._release(exchange)
            return

    async def _connection(self) -> tuple[_Exchange, bool]:
        """Return a connection, and whether it was kept from an earlier request."""
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.is_closed:
                return exchange, True
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        if secure is not None and self.insecure:
            secure.check_hostname = False
            secure.verify_mode = ssl.CERT_NONE
        port = parts.port or (443 if secure else 80)
        _, exchange = await asyncio.get_running_loop().create_connection(
            _Exchange, parts.hostname or "", port, ssl=secure
        )
        return exchange, False

    def _release(self, exchange: _Exchange) -> None:
        if exchange.is_reusable:
            self._idle.append(exchange)
        else:
            exchange.close()


class _Exchange(asyncio.Protocol):
    """A connection: `arrivals` has the pieces of the answer's body with their times, then None."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        self.is_closed = False
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self._status = 0
        self._error_body = b""
        self._complete = self._stays_open = False
        self._until_close = True
        self._begin()

    def send(self, message: bytes) -> None:
        """Send a request; its answer replaces that of the one before."""
        self._begin()
        if self._transport is not None:
            self._transport.write(message)

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def check(self) -> None:
        """Raise ApiError if the answer is an error, incomplete or missing."""
        if not self._status:
            raise ApiError("the server did not answer")
        if self._status != 200:
            raise ApiError(f"{self._status}: {message_of(self._error_body)}", self._status)
        if not self._complete:
            raise ApiError("the answer ended early")

    @property
    def is_unanswered(self) -> bool:
        """True if the connection ended before an answer began."""
        return self.is_closed and not self._status

    @property
    def is_reusable(self) -> bool:
        """True after a complete answer on a connection that stays open."""
        return self._complete and self._stays_open and not self.is_closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self.arrivals.put_nowait(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if not self._complete:
            self._complete = self._until_close
            self.arrivals.put_nowait(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self.arrivals.put_nowait((self._now, body))
        else:
            self._error_body += body

    def on_message_complete(self) -> None:
        self._complete = True
        self._stays_open = bool(self._parser.should_keep_alive())
        self.arrivals.put_nowait(None)

    def _begin(self) -> None:
        """Expect a new answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._error_body = b""
        self._complete = self._stays_open = False
        self._until_close = True  # The body has neither a length nor chunks: it ends with the connection.


def _data(event: bytes) -> bytes:
    """Return the data of a server-sent event, joined if it has several lines; empty for a comment."""
    lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def _record(outcome: Outcome, arrival: float, piece: Piece) -> None:
    if piece.prompt_tokens is not None:
        outcome.prompt_tokens = piece.prompt_tokens
    if piece.output_tokens is not None:
        outcome.output_tokens = piece.output_tokens
    if not piece.counts:
        return
    if outcome.end:
        outcome.gaps.append(arrival - outcome.end)
    else:
        outcome.ttft = arrival - outcome.start
    outcome.end = arrival
    outcome.text += piece.text
    if piece.output_tokens is None:
        outcome.output_tokens += 1
