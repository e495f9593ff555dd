"""Forwards requests that need stored state to the API server process that has it: process 0.

Responses, conversations, files and batches live in one process's memory. The others pass such requests on, unchanged,
over a unix socket, and their responses back, as they arrive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from typing import Any, Final
from urllib.parse import quote

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.server.http.errors import HttpError, error_response
from pagoda.server.http.response import KEEP_STREAM, LOST_RESPONSE, json_response

STATEFUL: Final = ("/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches")
"""First parts of the paths that process 0 answers."""

_READ_BYTES: Final = 65_536

_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"date", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Headers that belong to one connection, or that this process adds itself."""


class Forwarder:
    """ASGI middleware: forwards STATEFUL paths, with and without `prefix`, to the HTTP server at a unix socket."""

    def __init__(self, app: ASGIApp, path: str, prefix: str) -> None:
        self._app = app
        self._path = path
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_stateful(scope["path"]):
            await self._app(scope, receive, send)
            return
        started = False
        kept = ExitStack()

        async def send_response(message: Message) -> None:
            nonlocal started
            begins = not started
            started = True
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                kept.close()
            await send(message)
            if begins and _is_stream(message["headers"]):
                kept.enter_context(scope.get(KEEP_STREAM, nullcontext)(LOST_RESPONSE))

        try:
            with kept:
                await self._forward(scope, receive, send_response)
        except (OSError, httptools.HttpParserError):
            if started:
                raise
            body, headers = error_response(
                scope["path"], HttpError(503, "API server process 0, which has this state, does not answer")
            )
            await json_response(body, 503, headers)(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            await _exchange(scope, receive, send, reader, writer)
        finally:
            writer.close()

    def _is_stateful(self, path: str) -> bool:
        inside = path.removeprefix(self._prefix)
        return any(candidate.startswith(STATEFUL) for candidate in (path, inside))


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


async def _exchange(
    scope: Scope, receive: Receive, send: Send, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Send the request and return its response. If the client disconnects, so does this process."""
    upload = asyncio.ensure_future(_send_request(scope, receive, writer))
    download = asyncio.ensure_future(_return_response(send, reader))
    try:
        await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
        if not download.done() and not upload.cancelled() and upload.exception() is None:
            return  # The client has disconnected.
        await download
    finally:
        for task in (upload, download):
            task.cancel()
        await asyncio.gather(upload, download, return_exceptions=True)


async def _send_request(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Send the request; return when the client has disconnected. Raise OSError if the other process has."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    writer.write(_head(scope, headers, chunked))
    more = True
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body = message.get("body", b"")
        if body:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
        if more and not message.get("more_body", False):
            more = False
            if chunked:
                writer.write(b"0\r\n\r\n")
        await writer.drain()


def _head(scope: Scope, headers: Iterable[tuple[bytes, bytes]], chunked: bool) -> bytes:
    target = scope.get("raw_path") or quote(scope["path"]).encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
    kept.append((b"connection", b"close"))
    if chunked:
        kept.append((b"transfer-encoding", b"chunked"))
    # This process's server leaves out the body of a response to HEAD.
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    lines = [f"{method} ".encode() + target + b" HTTP/1.1", *(name + b": " + value for name, value in kept)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _return_response(send: Send, reader: asyncio.StreamReader) -> None:
    parsed = _ParsedResponse()
    while not parsed.complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("API server process 0 ended a response early")
        parsed.feed(data)
        while parsed.messages:
            await send(parsed.messages.popleft())


class _ParsedResponse:
    """Parses a response into ASGI messages."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.complete = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._parser: Any = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse data."""
        self._parser.feed_data(data)

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.messages.append(
            {
                "type": "http.response.start",
                "status": self._parser.get_status_code(),
                "headers": [header for header in self._headers if header[0] not in _HOP_BY_HOP],
            }
        )

    def on_body(self, body: bytes) -> None:
        self.messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        self.complete = True
        self.messages.append({"type": "http.response.body", "body": b"", "more_body": False})
