"""A request to the HTTP application from inside its own process: no socket, the same routes, the same answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp

logger = logging.getLogger(__name__)


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a POST of JSON. What the application breaks on is logged, and answered 500."""
    answer = _Answer(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, answer.receive, answer.send)
    except Exception:
        if not answer.status:
            raise
        logger.exception("%s failed", path)
    return answer.status, bytes(answer.body)


class _Answer:
    """The client's end: sends one body, then stays connected, and gathers what comes back."""

    def __init__(self, request: bytes) -> None:
        self._request: bytes | None = request
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> dict[str, Any]:
        """The request, once; after it nothing comes."""
        if self._request is None:
            await asyncio.Event().wait()
        request, self._request = self._request, None
        return {"type": "http.request", "body": request, "more_body": False}

    async def send(self, message: Any) -> None:
        """Take in a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
