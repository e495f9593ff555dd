"""Event streams: when the client disconnects, the events' generator is closed at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.server.http.response import DirectSendMiddleware, EventStream
from pagoda.server.http.state import StopSignal


async def test_a_disconnect_before_the_first_read_closes_the_events() -> None:
    """`send` of the first event blocks, as on a connection that is not read."""
    ended: list[str] = []
    blocked = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            yield b"second"
        finally:
            ended.append("events")

    async def receive() -> dict[str, Any]:
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            blocked.set()
            await asyncio.Event().wait()

    source = events()
    stream = EventStream(await anext(source), source, StopSignal(), {})
    await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert ended == ["events"], "closed, not left to the garbage collector"


class Watching:
    """ASGI middleware that records the messages it sees."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[bytes | str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Any) -> None:
            self.seen.append(message.get("body", message["type"]))
            await send(message)

        await self.app(scope, receive, noting)


async def test_chunks_skip_inner_middleware_only() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"two"

    async def receive() -> Any:
        await asyncio.Event().wait()

    sent: list[bytes | str] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", message["type"]))

    inside = Watching(EventStream(b"one", events(), StopSignal(), {}))
    outside = Watching(DirectSendMiddleware(inside))
    await outside({"type": "http"}, receive, send)
    assert sent == ["http.response.start", b"one", b"two", b""]
    assert outside.seen == sent
    assert inside.seen == ["http.response.start", b""]
