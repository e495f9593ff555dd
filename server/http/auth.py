"""API keys: every path is closed but a short list, compared with the path that is routed.

An ASGI middleware. Knows keys and paths, not what the routes do.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.server.http.fields.errors import HttpError, error_answer
from pagoda.server.http.stream import encode_json

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/ping", "/version", "/metrics", "/load"})
"""What probes and scrapers need, and the chat page, which asks for a key; none shows a prompt or starts work."""

_OWNER: Final = "pagoda.owner"


def owner_of(scope: Scope) -> bytes:
    """Digest of the key that a request presented; empty where the server asks for none."""
    owner = scope.get(_OWNER, b"")
    assert isinstance(owner, bytes)
    return owner


class ApiKeyMiddleware:
    """Lets a request through when its path is open or it presents one of the keys.

    `Authorization: Bearer KEY` everywhere; `X-API-Key: KEY`, as clients of the Messages API send it, is as good.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        owner = None if scope["type"] == "lifespan" else self._digest(scope)
        if owner is not None:
            scope[_OWNER] = owner
        if scope["type"] == "lifespan" or self._is_open(scope) or owner is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = HttpError(401, "missing or wrong API key; send the header Authorization: Bearer KEY")
            body, headers = error_answer(get_route_path(scope), error)
            headers["www-authenticate"] = "Bearer"
            answer = Response(encode_json(body), 401, headers, media_type="application/json")
            await answer(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and get_route_path(scope) in OPEN_PATHS

    def _digest(self, scope: Scope) -> bytes | None:
        """Digest of the key that a request presents; None without one of the right ones."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer, other = self._match(key), self._match(headers.get("x-api-key", ""))
        return bearer if bearer is not None and scheme.lower() == "bearer" else other

    def _match(self, key: str) -> bytes | None:
        """The key's digest if it is one of the keys'; all are compared, each in the same time."""
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return digest if any(matches) else None
