"""Request lines in OpenAI's batch format, the lines that answer them, and how the application answers one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import ASGIApp

from pagoda.server.http.errors import HttpError

LineT = TypeVar("LineT")
AnswerT = TypeVar("AnswerT")

logger = logging.getLogger(__name__)

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request line."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw  # JSON text for the endpoint.


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Options(msgspec.Struct):
    stream: Any = None
    background: Any = None
    encoding_format: Any = None


class LineError(Exception):
    """An invalid request line. `custom_id` is None if it cannot be read."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def parse_line(raw: bytes, number: int) -> BatchRequest:
    """Parse the request of line `number`. Raises LineError."""
    try:
        request = msgspec.json.decode(raw, type=BatchRequest)
        options = msgspec.json.decode(request.body, type=_Options)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # Its custom_id may still be readable.
        raise LineError(_custom_id(raw), f"line {number} is not a batch request: {error}") from None
    if request.method != "POST":
        raise LineError(request.custom_id, f"method {request.method[:20]!r} is not supported; use POST")
    if request.url not in ENDPOINTS:
        raise LineError(
            request.custom_id, f"url {request.url[:200]!r} is not supported; use one of {', '.join(ENDPOINTS)}"
        )
    for field in ("stream", "background"):
        if getattr(options, field):
            raise LineError(request.custom_id, f"{field} is not supported in a batch; leave it out")
    if options.encoding_format in ("bytes", "bytes_only"):
        raise LineError(request.custom_id, "encoding_format: a line cannot contain bytes; use float or base64")
    return request


def _custom_id(raw: bytes) -> str | None:
    try:
        custom_id = msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def line_id(model: str, number: int, raw: bytes) -> str:
    """Return the id of a line's answer: a hash of model, line number and content, stable across runs."""
    return "pagoda-" + hashlib.sha256(f"{model}\n{number}\n".encode() + raw.strip()).hexdigest()[:32]


def answer_line(answer_id: str, custom_id: str | None, status: int, body: bytes) -> bytes:
    """Return the answer line of a request from the endpoint's HTTP status and JSON body."""
    answer = {
        "id": answer_id,
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"pagoda-batch-{uuid.uuid4().hex}",
            "body": msgspec.Raw(body),
        },
        "error": None if status < 400 else msgspec.json.decode(body)["error"],
    }
    return msgspec.json.encode(answer) + b"\n"


def error_line(answer_id: str, error: LineError) -> bytes:
    """Return the answer line of an invalid request line."""
    http_error = HttpError(400, str(error))
    return answer_line(answer_id, error.custom_id, http_error.status, msgspec.json.encode(http_error.as_dict()))


# Answering.


async def in_order(
    lines: Iterator[LineT], answer: Callable[[LineT], Awaitable[AnswerT]], max_queued: int
) -> AsyncGenerator[AnswerT, None]:
    """Yield the answer of each line, in order. Up to `max_queued` lines are answered at the same time."""
    queued: deque[asyncio.Future[AnswerT]] = deque()
    try:
        for line in lines:
            if len(queued) >= max_queued:
                yield await queued.popleft()
            queued.append(asyncio.ensure_future(answer(line)))
        while queued:
            yield await queued.popleft()
    finally:
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)


async def post(app: ASGIApp, path: str, body: bytes, more: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
    """POST JSON to the application in this process. `more`: further keys of the ASGI scope.

    Returns status and body; an exception is logged and answered 500.
    """
    exchange = _AsgiExchange(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
        **(more or {}),
    }
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception:
        if not exchange.status:
            raise
        logger.exception("%s failed", path)
    return exchange.status, bytes(exchange.body)


class _AsgiExchange:
    """The client side of an ASGI call: sends one body, stays connected and collects the answer."""

    def __init__(self, request: bytes) -> None:
        self._request: bytes | None = request
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> dict[str, Any]:
        if self._request is None:
            await asyncio.Event().wait()
        request = self._request
        self._request = None
        return {"type": "http.request", "body": request, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
