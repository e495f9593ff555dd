"""What clients read of failures: nothing of why an engine ended, nor what its operator may do."""

from __future__ import annotations

import pytest

from pagoda.common.errors import EngineDeadError, EngineRestartingError, EngineUnavailableError, RequestLostError
from pagoda.server.http.errors import http_error

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
