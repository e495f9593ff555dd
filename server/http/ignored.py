"""The parts of requests that are accepted without effect: named in a response header, logged and counted.

Knows ASGI messages. Does not know which parts these are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.observe.metrics import Metrics
from pagoda.server.http.fields.base import Ignored

IGNORED_HEADER: Final = "x-pagoda-ignored"
MAX_HEADER_NAMES: Final = 32
"""Names in one header; further ones are counted at its end."""

_MAX_NAME: Final = 100
_PLAIN: Final = "[]=.-_/:+@"
"""Characters of a name that stay as they are in the header; others are percent-encoded."""

_STATE_KEY: Final = "ignored"

logger = logging.getLogger(__name__)


def note_ignored(
    request: Request, ignored: Iterable[Ignored], own_name: Callable[[str], str] = lambda field: field
) -> None:
    """Name these parts of the request in its response. `own_name`: the client's name for a path."""
    noted: list[Ignored] = request.scope.setdefault("state", {}).setdefault(_STATE_KEY, [])
    noted += [replace(each, path=own_name(each.path)) for each in ignored]


def header_value(ignored: Iterable[Ignored]) -> str:
    """Return the names of ignored parts, each once, as printable ASCII: `client_metadata, input[].phase, +3 more`."""
    names = list(dict.fromkeys(quote(each.name[:_MAX_NAME], safe=_PLAIN, errors="replace") for each in ignored))
    more = len(names) - MAX_HEADER_NAMES
    return ", ".join(names[:MAX_HEADER_NAMES] + ([f"+{more} more"] if more > 0 else []))


class IgnoredParts:
    """Adds x-pagoda-ignored to the response of each request that has ignored parts, logs them and counts them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            ignored = scope.get("state", {}).get(_STATE_KEY)
            if ignored and message["type"] == "http.response.start":
                value = header_value(ignored)
                MutableHeaders(scope=message)[IGNORED_HEADER] = value
                logger.debug("%s %s: ignored %s", scope["method"], quote(scope["path"]), value)
                self._metrics.on_ignored(each.kind for each in ignored)
            await send(message)

        await self._app(scope, receive, send_with_header)
