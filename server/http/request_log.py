"""What the log says about one HTTP request: its prompts, and with --enable-log-outputs its answers."""

from __future__ import annotations

import logging
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.observe.logs import shortened
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.http.fields.usage import REQUEST_ID_HEADER, id_header
from pagoda.server.outputs import RequestOutput
from pagoda.server.processing.inputs import Prompt, PromptType

logger = logging.getLogger(__name__)


class RequestLog:
    """Writes nothing unless `enabled`. Texts are cut to --max-log-len."""

    def __init__(self, config: ServerConfig, params: SamplingParams | PoolingParams, *, enabled: bool) -> None:
        self._limit = config.max_log_len
        self._params = params
        self._asks = enabled
        self._answers = enabled and config.enable_log_outputs
        self._deltas = config.enable_log_deltas and params.output_kind is RequestOutputKind.DELTA
        self._said: dict[tuple[str, int], list[str]] = {}

    def asked(self, request_id: str, prompt: PromptType | Prompt, user: str | None) -> None:
        """A prompt goes to the engine."""
        if self._asks:
            shown, params = shortened(repr(prompt), self._limit), shortened(repr(self._params), 1000)
            logger.info("request %s: prompt %s, params %s, user %r", request_id, shown, params, user)

    def answered(self, request_id: str, output: RequestOutput) -> None:
        """News of its answers."""
        if not self._answers:
            return
        for answer in output.outputs:
            self._said.setdefault((request_id, answer.index), []).append(answer.text)
            if answer.finish_reason is not None:
                self._whole(request_id, answer.index, answer.finish_reason)
            elif self._deltas:
                text = shortened(answer.text, self._limit)
                logger.info("request %s: choice %d goes on with %r", request_id, answer.index, text)

    def cut(self, request_id: str, reason: str) -> None:
        """Whatever it said, it says no more."""
        for each, index in list(self._said):
            if each == request_id:
                self._whole(request_id, index, reason)

    def _whole(self, request_id: str, index: int, reason: str) -> None:
        text = shortened("".join(self._said.pop((request_id, index))), self._limit)
        logger.info("request %s: choice %d said %r, finish reason %s", request_id, index, text, reason)


# The X-Request-Id header of every response.
#
# Knows ASGI messages. Does not know what is answered.

LONGEST_ID: Final = 256


class RequestIds:
    """Adds to each response the id that its request came with, else the answer's own, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")[:LONGEST_ID]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if given:
                    headers.update(id_header(given))
                else:
                    headers.setdefault(REQUEST_ID_HEADER, uuid.uuid4().hex)
            await send(message)

        await self._app(scope, receive, send_named)
