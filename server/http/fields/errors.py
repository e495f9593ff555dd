"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. `code` is the HTTP status, as in vLLM."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.errors import AbortedError, EngineDeadError, PagodaError, QueueFullError, RequestError, SleepError

_TYPES: Final = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    431: "RequestHeaderFieldsTooLargeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class UnavailableError(PagodaError):
    """The server cannot take this request now: still loading, or shutting down. HTTP 503."""


class ResponseNotFoundError(PagodaError):
    """There is no such response, or no more. HTTP 404."""


class ModelNotFoundError(PagodaError):
    """A model name that this server does not answer to. HTTP 404."""


@dataclass(eq=False)
class HttpError(Exception):
    """An error with the status it is answered with.

    `param`: the request field at fault, if one is. `code`: what a client of the Messages API tells such errors by.

    Not frozen: whoever handles an exception may set its traceback.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def http_error(error: BaseException) -> HttpError:
    """What a client is told about an exception: the cause of our own errors, nothing about any other."""
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), error.field or None)
        case ModelNotFoundError():
            return HttpError(404, str(error), "model")
        case ResponseNotFoundError():
            return HttpError(404, str(error), "response_id")
        case QueueFullError():
            return HttpError(429, str(error))
        case UnavailableError() | SleepError() | AbortedError():
            return HttpError(503, str(error))
        case EngineDeadError():
            return HttpError(500, f"the engine is dead: {error}")
        case _:
            return HttpError(500, "internal error; the server's log has the details")


# Errors in the shape of the Messages API, and which paths have it: {"type": "error", "error": {"type", "message"}}.

PREFIX: Final = "/v1/messages"
"""Paths of the Messages API begin with it."""

REQUEST_ID_HEADER: Final = "request-id"

_TYPES_MESSAGES_ERRORS: Final = {
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
    kind = _TYPES_MESSAGES_ERRORS.get(error.status, "api_error")
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
