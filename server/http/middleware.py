"""ASGI middleware: API keys, X-Request-Id, x-pagoda-ignored, and a direct path for the chunks of a stream."""

from __future__ import annotations

import hmac
import logging
import uuid
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final
from urllib.parse import quote

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.observe.metrics import Metrics
from pagoda.server.http.body import IGNORED_STATE, Ignored
from pagoda.server.http.fields.errors import HttpError, error_response
from pagoda.server.http.response import DIRECT_SEND, REQUEST_ID_HEADER, encode_json, id_header
from pagoda.server.http.state import MAX_ID_LENGTH

logger = logging.getLogger(__name__)

# API keys.

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/ping", "/version", "/metrics", "/load"})
"""Paths without a key: probes, scrapers, and the chat page, which asks for a key. None shows a prompt or runs one."""

_OWNER: Final = "pagoda.owner"


def owner_of(scope: Scope) -> bytes:
    """Return the digest of the request's API key; empty if the server has no keys."""
    owner = scope.get(_OWNER, b"")
    assert isinstance(owner, bytes)
    return owner


class ApiKeyMiddleware:
    """Requires one of the keys on every path but OPEN_PATHS, compared with the routed path.

    Accepts `Authorization: Bearer KEY` and, for clients of the Messages API, `X-API-Key: KEY`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        owner = None if scope["type"] == "lifespan" else self._digest(scope)
        if owner is not None:
            scope[_OWNER] = owner
        if scope["type"] == "lifespan" or self._is_open(scope) or owner is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = HttpError(401, "missing or invalid API key; send the header Authorization: Bearer KEY")
            body, headers = error_response(get_route_path(scope), error)
            headers["www-authenticate"] = "Bearer"
            response = Response(encode_json(body), 401, headers, media_type="application/json")
            await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and get_route_path(scope) in OPEN_PATHS

    def _digest(self, scope: Scope) -> bytes | None:
        """Return the digest of the request's key; None without a valid one."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer, other = self._match(key), self._match(headers.get("x-api-key", ""))
        return bearer if bearer is not None and scheme.lower() == "bearer" else other

    def _match(self, key: str) -> bytes | None:
        """Return the key's digest if it is valid. Compares with all keys, each in constant time."""
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return digest if any(matches) else None


class RequestIdMiddleware:
    """Sets X-Request-Id on each response: the request's header, else the id set by the route, else a random one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")[:MAX_ID_LENGTH]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if given:
                    headers.update(id_header(given))
                else:
                    headers.setdefault(REQUEST_ID_HEADER, uuid.uuid4().hex)
            await send(message)

        await self._app(scope, receive, send_with_id)


# Ignored parts of requests.

IGNORED_HEADER: Final = "x-pagoda-ignored"
MAX_HEADER_NAMES: Final = 32
"""Maximum number of names in one header; the number of further ones is appended."""

_MAX_NAME: Final = 100
_PLAIN: Final = "[]=.-_/:+@"
"""Characters of a name that are not percent-encoded in the header."""


def header_value(ignored: Iterable[Ignored]) -> str:
    """Return the distinct names of ignored parts as printable ASCII: `client_metadata, input[].phase, +3 more`."""
    names = list(dict.fromkeys(quote(each.name[:_MAX_NAME], safe=_PLAIN, errors="replace") for each in ignored))
    more = len(names) - MAX_HEADER_NAMES
    return ", ".join(names[:MAX_HEADER_NAMES] + ([f"+{more} more"] if more > 0 else []))


class IgnoredPartsMiddleware:
    """Sets x-pagoda-ignored on responses to requests with ignored parts, and logs and counts those."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            ignored = scope.get("state", {}).get(IGNORED_STATE)
            if ignored and message["type"] == "http.response.start":
                value = header_value(ignored)
                MutableHeaders(scope=message)[IGNORED_HEADER] = value
                logger.debug("%s %s: ignored %s", scope["method"], quote(scope["path"]), value)
                self._metrics.on_ignored(each.kind for each in ignored)
            await send(message)

        await self._app(scope, receive, send_with_header)


class DirectSendMiddleware:
    """Lets EventStream send chunks past the middleware inside of this one, see DIRECT_SEND."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)
