"""Lines of a batch: a request in OpenAI's batch format, and the line that answers it.

Knows JSON and the endpoints that a batch may name. Does not know how a request is answered.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

import msgspec

from pagoda.server.protocol.errors import HttpError

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. `body`: the JSON text that the endpoint gets."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Streamed(msgspec.Struct):
    stream: Any = None


class LineError(Exception):
    """A line that is no request. `custom_id`: what it calls itself, if that can be read."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def parse_line(raw: bytes, number: int) -> BatchRequest:
    """The request on line `number`. Raises LineError."""
    try:
        request = msgspec.json.decode(raw, type=BatchRequest)
        streams = msgspec.json.decode(request.body, type=_Streamed).stream
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # what else is in the line shall still be told
        raise LineError(_custom_id(raw), f"line {number} is no batch request: {error}") from None
    if request.method != "POST":
        raise LineError(request.custom_id, f"method {request.method[:20]!r} is not supported; use POST")
    if request.url not in ENDPOINTS:
        raise LineError(
            request.custom_id, f"url {request.url[:200]!r} is not supported; use one of {', '.join(ENDPOINTS)}"
        )
    if streams:
        raise LineError(request.custom_id, "stream is not supported in a batch; leave it out")
    return request


def _custom_id(raw: bytes) -> str | None:
    try:
        found = msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, str) else None


def answer_line(custom_id: str | None, status: int, body: bytes) -> bytes:
    """The line that answers a request with what the endpoint said: HTTP status and JSON body."""
    answer = {
        "id": f"pagoda-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"pagoda-batch-{uuid.uuid4().hex}",
            "body": msgspec.Raw(body),
        },
        "error": None if status < 400 else msgspec.json.decode(body)["error"],
    }
    return msgspec.json.encode(answer) + b"\n"


def error_line(error: LineError) -> bytes:
    """The line that answers a line that is no request."""
    told = HttpError(400, str(error))
    return answer_line(error.custom_id, told.status, msgspec.json.encode(told.as_dict()))
