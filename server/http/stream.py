"""Answers that end when their client leaves or the server stops: one wait for whole answers and for event streams.

Knows ASGI messages. Does not know what an answer says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.server.http.fields.errors import UnavailableError, http_error

T = TypeVar("T")

encode_json: Final = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment, which clients skip and proxies see."""


class ClientLeftError(Exception):
    """The client closed its connection before the answer was complete."""


def event(payload: Any) -> bytes:
    """One server-sent event; bytes are one already."""
    if isinstance(payload, bytes):
        return payload
    return b"data: " + encode_json(payload) + b"\n\n"


def error_event(error: BaseException) -> bytes:
    """An error inside a stream, followed by the stream's end."""
    return event(http_error(error).as_dict()) + DONE


def named_event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event under the name that its `type` gives."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + encode_json(payload) + b"\n\n"


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How an API writes its streams. `failure`: the end of a stream that an error cuts; `done`: of any other."""

    event: Callable[[Any], bytes] = event
    failure: Callable[[BaseException], bytes] = error_event
    done: bytes = DONE
    keep_alive: bytes = KEEP_ALIVE


COMPLETION_STYLE: Final = EventStyle()
"""Events without names, then [DONE]."""


async def with_pauses(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Items as they come, and None each time that `seconds` pass without one; 0: items alone. Closes `items`."""
    async with aclosing(items):
        if not seconds:
            async for item in items:
                yield item
            return
        coming: asyncio.Future[T] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(items))
                done, _ = await asyncio.wait({coming}, timeout=seconds)
                if not done:
                    yield None
                    continue
                item, coming = coming.result(), None
                yield item
        except StopAsyncIteration:
            pass
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


class Stopping:
    """Whether the server is about to end. Set once; then everybody within `telling` hears of it."""

    def __init__(self) -> None:
        self._is_set = False
        self._told: set[Callable[[], None]] = set()

    def set(self) -> None:
        """Tell everybody."""
        self._is_set = True
        for hear in list(self._told):
            hear()

    @contextmanager
    def telling(self, hear: Callable[[], None]) -> Iterator[None]:
        """Call `hear` when it is set within this context; soon, if it is set already."""
        self._told.add(hear)
        if self._is_set:
            asyncio.get_running_loop().call_soon(hear)
        try:
            yield
        finally:
            self._told.discard(hear)


async def until_left(receive: Receive, stopping: Stopping, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled at once when the client leaves or `stopping` is set.

    The request body must have been read. Raises ClientLeftError or UnavailableError, or what `work` raises.

    The work has a task of its own: it goes on with every token, and in the caller's task would be reached through all
    layers of the application each time.
    """
    task = asyncio.ensure_future(work)
    cut: list[Exception] = []

    def cut_with(error: Exception) -> None:
        if not cut:  # once, so that what the work does at its end is not cut, too
            cut.append(error)
            task.cancel()

    left = asyncio.ensure_future(_disconnected(receive))
    left.add_done_callback(lambda _: cut_with(ClientLeftError()))
    try:
        with stopping.telling(lambda: cut_with(UnavailableError("the server is shutting down"))):
            return await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not cut or (caller is not None and caller.cancelling()):  # somebody else cancelled it
            raise
        raise cut[0] from None
    finally:
        left.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_PARTS: Final = "pagoda.send_parts"


class StraightParts:
    """Lets the parts of a stream pass by the layers inside of this one, which only look at how an answer begins.

    Each of them would cost a coroutine per part, which is per token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope[_PARTS] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends `first` and the events that follow; their generator is closed when the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        stopping: Stopping,
        headers: dict[str, str],
        style: EventStyle = COMPLETION_STYLE,
    ) -> None:
        self._first = first
        self._events = events
        self._stopping = stopping
        self._style = style
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await until_left(receive, self._stopping, self._send_all(scope.get(_PARTS, send)))
        except ClientLeftError:
            return
        except UnavailableError as error:
            await send({"type": "http.response.body", "body": self._style.failure(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
