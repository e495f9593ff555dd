"""The X-Request-Id header of every response.

Knows ASGI messages. Does not know what is answered.
"""

from __future__ import annotations

import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.server.protocol.head import REQUEST_ID_HEADER, id_header

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
