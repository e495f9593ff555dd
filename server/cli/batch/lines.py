"""Lines of a batch: a request in OpenAI's batch format, and the line that answers it.

Knows JSON and the endpoints that a batch may name. Does not know how a request is answered.
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
    """One request. `body`: the JSON text that the endpoint gets."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Manner(msgspec.Struct):
    stream: Any = None
    background: Any = None
    encoding_format: Any = None


class _Response(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    id: str
    response: _Response


class LineError(Exception):
    """A line that is no request. `custom_id`: what it calls itself, if that can be read."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def parse_line(raw: bytes, number: int) -> BatchRequest:
    """The request on line `number`. Raises LineError."""
    try:
        request = msgspec.json.decode(raw, type=BatchRequest)
        manner = msgspec.json.decode(request.body, type=_Manner)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # what else is in the line shall still be told
        raise LineError(_custom_id(raw), f"line {number} is no batch request: {error}") from None
    if request.method != "POST":
        raise LineError(request.custom_id, f"method {request.method[:20]!r} is not supported; use POST")
    if request.url not in ENDPOINTS:
        raise LineError(
            request.custom_id, f"url {request.url[:200]!r} is not supported; use one of {', '.join(ENDPOINTS)}"
        )
    for field in ("stream", "background"):
        if getattr(manner, field):
            raise LineError(request.custom_id, f"{field} is not supported in a batch; leave it out")
    if manner.encoding_format in ("bytes", "bytes_only"):
        raise LineError(request.custom_id, "encoding_format: a line holds no bytes; use float or base64")
    return request


def _custom_id(raw: bytes) -> str | None:
    try:
        found = msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, str) else None


def line_id(model: str, number: int, raw: bytes) -> str:
    """What the answer to a line is called: the same for the same line in the same place, put to the same model."""
    return "pagoda-" + hashlib.sha256(f"{model}\n{number}\n".encode() + raw.strip()).hexdigest()[:32]


def read_answer(raw: bytes) -> tuple[str, bool] | None:
    """The name of an answer and whether it is a good one; None for a line that is no answer, or not all of one."""
    try:
        answer = msgspec.json.decode(raw, type=_Answered)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return answer.id, answer.response.status_code < 400


def answer_line(answer_id: str, custom_id: str | None, status: int, body: bytes) -> bytes:
    """The line that answers a request with what the endpoint said: HTTP status and JSON body."""
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
    """The line that answers a line that is no request."""
    told = HttpError(400, str(error))
    return answer_line(answer_id, error.custom_id, told.status, msgspec.json.encode(told.as_dict()))


# Where a batch that was cut off goes on: behind the answers that are there already.
#
# Answers stand in the order of the requests, so those that are there answer the first lines. Knows lines, not engines.


@dataclass(frozen=True, slots=True)
class Line:
    """A request as it came. `id`: what its answer is called."""

    number: int
    raw: bytes
    id: str


@dataclass(frozen=True, slots=True)
class BatchFile:
    """What is left to do. `answered`: lines that were answered by an earlier run, `failed` of them not well."""

    lines: Iterator[Line]
    answered: int
    failed: int


def resumed(source: IO[bytes], model: str, output: BatchOutput) -> BatchFile:
    """The lines of `source` that `output` has no answers to. What is not a whole answer is cut off there.

    Raises ConfigError when the answers are those of another batch.
    """
    lines = (Line(number, raw, line_id(model, number, raw)) for number, raw in enumerate(source, 1) if raw.strip())
    answered = failed = end = 0
    left: Iterator[Line] = lines
    for raw in output.answers():
        line = next(lines, None)
        if line is None:
            break
        if (answer := read_answer(raw)) is None or answer[0] != line.id:
            left = chain([line], lines)
            break
        answered, failed, end = answered + 1, failed + (not answer[1]), end + len(raw)
    output.keep(answered, end)
    return BatchFile(left, answered, failed)
