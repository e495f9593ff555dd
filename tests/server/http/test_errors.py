"""What clients read of failures: types and codes that they act on, nothing of why an engine ended or what its operator
may do."""

from __future__ import annotations

import pytest

from pagoda.common.errors import (
    EngineDeadError,
    EngineRestartingError,
    EngineUnavailableError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestLostError,
)
from pagoda.server.http.errors import HttpError, ModelNotFoundError, http_error, messages_error, response_error

CAUSE = "the engine process was killed by SIGKILL: out of memory? Then lower --max-model-len"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (EngineDeadError(CAUSE), 500, "the engine has ended; the server's log says why"),
        (EngineUnavailableError(CAUSE), 503, "the engine does not answer at present; try again later"),
        (RequestLostError(CAUSE), 503, RequestLostError.client_message),
        (EngineRestartingError(CAUSE), 503, "the engine is being restarted; try again shortly"),
        (ValueError(CAUSE), 500, "internal error; see the server's log"),
    ],
)
def test_the_cause_is_the_operators(error: Exception, status: int, message: str) -> None:
    told = http_error(error)
    assert (told.status, told.message) == (status, message)


LONG = PromptTooLongError("messages", "why", num_tokens=12, limit=9)


@pytest.mark.parametrize(
    ("error", "kind", "code", "code_of_response"),
    [
        (LONG, "invalid_request_error", "context_length_exceeded", "context_length_exceeded"),
        (LONG.renamed("input", "why"), "invalid_request_error", "context_length_exceeded", "context_length_exceeded"),
        (RequestError("n", "why"), "invalid_request_error", None, "invalid_prompt"),
        (ModelNotFoundError("why"), "invalid_request_error", "model_not_found", "model_not_found"),
        (HttpError(401, "why"), "invalid_request_error", "invalid_api_key", "invalid_api_key"),
        (QueueFullError("why"), "requests", "rate_limit_exceeded", "rate_limit_exceeded"),
        (EngineDeadError(CAUSE), "server_error", None, "server_error"),
    ],
)
def test_types_and_codes_are_those_of_openai(
    error: Exception, kind: str, code: str | None, code_of_response: str
) -> None:
    body = http_error(error).as_dict()["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert response_error(error)["code"] == code_of_response


def test_the_messages_api_has_its_own_text_of_a_long_prompt() -> None:
    error = messages_error(http_error(LONG), "req_1")["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 12 tokens > 9 maximum"}
