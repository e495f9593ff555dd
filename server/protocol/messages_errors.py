"""Errors in the shape of the Messages API, and which paths have it: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import uuid
from typing import Any, Final

from pagoda.server.protocol.errors import HttpError

PREFIX: Final = "/v1/messages"
"""Paths of the Messages API begin with it."""

REQUEST_ID_HEADER: Final = "request-id"

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_request_id() -> str:
    """The id under which an answer of the Messages API is spoken of."""
    return f"req_{uuid.uuid4().hex}"


def is_messages_path(path: str) -> bool:
    """Whether the path belongs to the Messages API."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def messages_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error. The message names the field at fault, for which this shape has no place."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _TYPES.get(error.status, "api_error")
    shown: dict[str, Any] = {"type": kind, "message": message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


def error_answer(path: str, error: HttpError) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of an error, in the shape of the API that the path belongs to."""
    if not is_messages_path(path):
        return error.as_dict(), {}
    request_id = new_request_id()
    return messages_error(error, request_id), {REQUEST_ID_HEADER: request_id}
