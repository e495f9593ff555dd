"""Error responses: OpenAI's format, {"error": {"message", "type", "param", "code"}}, that of a failed response of the
Responses API, and the Messages API's, {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.errors import (
    AbortedError,
    AnswerError,
    EngineDeadError,
    EngineUnavailableError,
    PagodaError,
    PluginError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    SleepError,
)

_CODES: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""HTTP status -> `code` of errors that have none of their own, as in OpenAI's API."""


class ClientDisconnectedError(Exception):
    """The client closed its connection before the response was complete."""


class UnavailableError(PagodaError):
    """The server is loading or shutting down. HTTP 503."""


LOST: Final = UnavailableError("the process that sent this stream has ended; send the request again")
"""What a stream ends with whose API server process is killed."""


class ResponseNotFoundError(PagodaError):
    """No stored response has this id. HTTP 404."""


class ModelNotFoundError(PagodaError):
    """The requested model name is not served. HTTP 404."""


@dataclass(eq=False)
class HttpError(Exception):
    """An error with its HTTP status. Not frozen: exception handling sets `__traceback__`."""

    status: int
    message: str
    param: str | None = None  # The innermost value of the request that is wrong.
    code: str | None = None  # OpenAI's code; None: that of the status.
    messages_text: str | None = None  # The message in the Messages API, if its clients read another one.
    messages_code: str | None = None  # The code in `details` of the Messages API.

    def __post_init__(self) -> None:
        if self.code is None:
            self.code = _CODES.get(self.status)

    def as_dict(self) -> dict[str, Any]:
        """Return the response body in OpenAI's format."""
        return {"error": {"message": self.message, "type": self._type, "param": self.param, "code": self.code}}

    @property
    def _type(self) -> str:
        """OpenAI's type. Of a rate limit it is what is limited."""
        if self.status >= 500:
            return "server_error"
        return "requests" if self.status == 429 else "invalid_request_error"


def http_error(error: BaseException) -> HttpError:
    """Map an exception to an HTTP error. Messages of exceptions other than pagoda's own are not disclosed, nor is why
    the engine ended."""
    match error:
        case HttpError():
            return error
        case PromptTooLongError(num_tokens=num_tokens, limit=limit):
            text = f"prompt is too long: {num_tokens} tokens > {limit} maximum"
            return HttpError(400, str(error), error.field or None, "context_length_exceeded", messages_text=text)
        case RequestError():
            return HttpError(400, str(error), error.field or None)
        case ModelNotFoundError():
            return HttpError(404, str(error), "model", "model_not_found")
        case ResponseNotFoundError():
            return HttpError(404, str(error), "response_id")
        case QueueFullError():
            return HttpError(429, str(error))
        case EngineUnavailableError():
            return HttpError(503, error.client_message)
        case UnavailableError() | SleepError() | AbortedError():
            return HttpError(503, str(error))
        case RequestTimeoutError():
            return HttpError(504, str(error))
        case EngineDeadError():
            return HttpError(500, error.client_message)
        case PluginError() | AnswerError():
            return HttpError(500, str(error))
        case _:
            return HttpError(500, "internal error; see the server's log")


def response_error(error: BaseException) -> dict[str, Any]:
    """Return `error` of a failed response of the Responses API, whose `code` is never null."""
    failure = http_error(error)
    code = failure.code or ("invalid_prompt" if failure.status < 500 else "server_error")
    return {"code": code, "message": failure.message}


def response_error_event(error: BaseException) -> dict[str, Any]:
    """Return the event that ends a stream of the Responses API which cannot go on."""
    return {"type": "error", **response_error(error), "param": http_error(error).param}


# The Messages API.

_COHERE_CHAT_PATHS: Final = frozenset({"/v2/chat", "/cohere/v2/chat", "/v2/chat/render", "/cohere/v2/chat/render"})
"""Paths whose errors also have `message` beside `error`, where Cohere's clients read it."""

_MESSAGES_PATH: Final = "/v1/messages"

REQUEST_ID_HEADER: Final = "request-id"

_MESSAGES_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def new_request_id() -> str:
    """Return a request id in the format of the Messages API."""
    return f"req_{uuid.uuid4().hex}"


def is_messages_path(path: str) -> bool:
    """Return whether the path belongs to the Messages API."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def messages_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """Return the response body in the Messages API's format, which has no `param`: the message names the field."""
    message = error.message
    if error.messages_text is not None:
        message = error.messages_text
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    body: dict[str, Any] = {"type": _MESSAGES_TYPES.get(error.status, "api_error"), "message": message}
    if error.messages_code is not None:
        body["details"] = {"error_code": error.messages_code}
    return {"type": "error", "error": body, "request_id": request_id}


def error_response(path: str, error: HttpError) -> tuple[dict[str, Any], dict[str, str]]:
    """Return body and headers of an error response in the format of the API that `path` belongs to."""
    if path in _COHERE_CHAT_PATHS:
        return error.as_dict() | {"message": error.message}, {}
    if not is_messages_path(path):
        return error.as_dict(), {}
    request_id = new_request_id()
    return messages_error(error, request_id), {REQUEST_ID_HEADER: request_id}
