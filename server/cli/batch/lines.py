"""Lines of a batch:

requests in OpenAI's batch format, the lines that answer them, and resuming after a partial output.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, Final

import msgspec

from pagoda.server.cli.batch.io import BatchOutput
from pagoda.server.http.fields.errors import HttpError

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
    body: msgspec.Raw  # JSON text for the endpoint


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Options(msgspec.Struct):
    stream: Any = None
    background: Any = None
    encoding_format: Any = None


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    response: _Response


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # its custom_id may still be readable
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


def read_answer(raw: bytes) -> tuple[str, bool] | None:
    """Return an answer line's id and whether it succeeded; None if the line is not a complete answer."""
    try:
        answer = msgspec.json.decode(raw, type=_Answered)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return answer.id, answer.response.status_code < 400


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


@dataclass(frozen=True, slots=True)
class Line:
    """A raw request line."""

    number: int
    raw: bytes
    id: str  # of its answer


@dataclass(frozen=True, slots=True)
class BatchFile:
    """The remaining lines of a batch, and the counts of a previous run."""

    lines: Iterator[Line]
    answered: int
    failed: int  # of the answered


def resumed(source: IO[bytes], model: str, output: BatchOutput) -> BatchFile:
    """Return the lines of `source` not yet answered in `output`, and truncate `output` after its last valid answer.

    Answers are in the order of the requests. Raises ConfigError if the answers belong to another batch.
    """
    lines = (Line(number, raw, line_id(model, number, raw)) for number, raw in enumerate(source, 1) if raw.strip())
    answered = failed = end = 0
    remaining: Iterator[Line] = lines
    for raw in output.answers():
        line = next(lines, None)
        if line is None:
            break
        if (answer := read_answer(raw)) is None or answer[0] != line.id:
            remaining = chain([line], lines)
            break
        answered, failed, end = answered + 1, failed + (not answer[1]), end + len(raw)
    output.resume(answered, end)
    return BatchFile(remaining, answered, failed)
