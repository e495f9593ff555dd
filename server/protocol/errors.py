"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. `code` is the HTTP status, as in vLLM."""

from __future__ import annotations

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
