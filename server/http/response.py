"""HTTP responses, whole and streamed: both are built from the same outputs, and end when the client disconnects or the
server stops."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.engine.messages import EngineStats
from pagoda.common.errors import PagodaError
from pagoda.server.http.body import Ignored, note_ignored
from pagoda.server.http.errors import LOST, ClientDisconnectedError, UnavailableError, http_error
from pagoda.server.http.generation import num_prompt_tokens
from pagoda.server.http.state import ServerState, StopSignal
from pagoda.server.outputs import PromptLogprobs, RequestOutput, SampleLogprobs

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_DISCONNECTED: Final = 499
"""Status, for logs, of a response whose client disconnected."""

JSON: Final = "application/json"

encode_json: Final = msgspec.json.Encoder().encode


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `content` encoded as JSON."""
    return Response(encode_json(content), status, headers, media_type=JSON)


# What a route provides: outputs, and a builder that turns them into a response.


class OutputSource(Protocol):
    """Produces the outputs of one HTTP request: a Generation or a beam search."""

    request_id: str
    ignored: tuple[Ignored, ...]

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output)."""
        ...


class ResponseBuilder(Protocol):
    """Builds one response: `chunks` per output and `usage_chunk` for a stream; `add` per output, then `whole`."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any] | bytes]:
        """Yield the stream chunks of an output; bytes are an encoded event."""
        ...

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the last chunk of a stream that reports usage."""
        ...

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add an output to the whole response."""
        ...

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        ...


class Usage:
    """Token counts: prompt tokens once per prompt, generated tokens of all choices."""

    __slots__ = ("_cached", "_completion", "_details", "_prompt", "_reasoning")

    def __init__(self, *, details: bool) -> None:
        self._details = details  # report cached prompt tokens
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion = 0
        self._reasoning: int | None = None

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Add the tokens of a delta output."""
        self._prompt[prompt_index] = num_prompt_tokens(output)
        self._cached[prompt_index] = output.num_cached_tokens or 0
        for completion in output.outputs:
            self._completion += len(completion.token_ids)

    def count_reasoning(self, tokens: int | None) -> None:
        """Add reasoning tokens of a choice; None without a reasoning parser."""
        if tokens is not None:
            self._reasoning = (self._reasoning or 0) + tokens

    def count_dropped(self, tokens: int) -> None:
        """Add generated tokens that are not returned."""
        self._completion += tokens

    def forget_generated(self) -> None:
        """Reset the generated tokens: the response contains prompts only."""
        self._completion = 0

    def of_prompt(self) -> dict[str, Any]:
        """Return `usage` before the first generated token."""
        prompt = sum(self._prompt.values())
        return {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}

    def as_dict(self) -> dict[str, Any]:
        """Return `usage` in OpenAI's format."""
        prompt = sum(self._prompt.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._completion,
            "completion_tokens": self._completion,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        if self._reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return usage


# Response headers.

REQUEST_ID_HEADER: Final = "x-request-id"

_PLAIN: Final = " !#$&'()*+,/:;=?@[]~"
"""Characters of an id that are not percent-encoded in a header, besides letters, digits and _.-"""


def id_header(request_id: str) -> dict[str, str]:
    """Return the X-Request-Id header, with unsafe characters of a client's id percent-encoded."""
    return {REQUEST_ID_HEADER: quote(request_id, safe=_PLAIN, errors="replace")}


# Engine load for load balancers: Open Request Cost Aggregation (ORCA), as in vLLM.

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"  # request header: TEXT or JSON
LOAD_HEADER: Final = "endpoint-load-metrics"


def load_report(form: str | None, stats: EngineStats) -> dict[str, str]:
    """Return the load header in the requested format; empty for none or an unknown one."""
    if not form:
        return {}
    metrics = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": float(stats.waiting)}
    match form.upper():
        case "TEXT":
            return {
                LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
            }
        case "JSON":
            return {LOAD_HEADER: "JSON " + json.dumps({"named_metrics": metrics})}
        case _:
            return {}


# Server-sent events.

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"  # a comment: ignored by clients, keeps proxies from timing out


def event(payload: Any) -> bytes:
    """Encode a server-sent event; bytes are returned as they are."""
    if isinstance(payload, bytes):
        return payload
    return b"data: " + encode_json(payload) + b"\n\n"


def error_event(error: BaseException) -> bytes:
    """Encode an error that ends a stream."""
    return event(http_error(error).as_dict()) + DONE


def named_event(payload: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event named after its `type`."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + encode_json(payload) + b"\n\n"


LOST_RESPONSE: Final = named_event({"type": "error", "code": "server_error", "message": str(LOST), "param": None})
"""The end of a stream of the Responses API whose process is killed. Nobody else knows its sequence number."""


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How an API encodes its streams."""

    event: Callable[[Any], bytes] = event
    failure: Callable[[BaseException], bytes] = error_event  # end of a failed stream
    done: bytes = DONE  # end of a complete stream
    lost: bytes = error_event(LOST)  # end of a stream whose process is killed: another process sends it
    keep_alive: bytes = KEEP_ALIVE


COMPLETION_STYLE: Final = EventStyle()  # unnamed events, then [DONE]


async def respond(
    request: Request,
    state: ServerState,
    source: OutputSource,
    builder: ResponseBuilder,
    *,
    stream: bool,
    style: EventStyle = COMPLETION_STYLE,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Run the request and return its response. Errors before the first output are raised."""
    config = state.config
    if source.ignored:
        note_ignored(request, source.ignored)
    headers = dict(headers or {})
    if config.enable_request_id_headers:
        headers |= id_header(source.request_id)
    if not stream:
        whole = await cancel_on_disconnect(request.receive, state.stopping, _whole(source, builder))
        headers |= load_report(request.headers.get(LOAD_FORMAT_HEADER), state.engine.stats)
        return Response(whole, headers=headers, media_type=JSON)
    pause = config.sse_keep_alive_interval
    log_errors = config.log_error_stack
    events = _events(source, builder, style, pause=pause, log_errors=log_errors)
    first = await cancel_on_disconnect(request.receive, state.stopping, anext(events))
    return EventStream(first, events, state.stopping, headers, style)


async def _whole(source: OutputSource, builder: ResponseBuilder) -> bytes:
    """Return the whole response as JSON. What takes long is done in a thread, so that other requests keep streaming."""

    def encoded() -> bytes:
        return encode_json(builder.whole())

    total = 0
    async with aclosing(source.outputs()) as outputs:
        async for index, output in outputs:
            size = _size(output)
            total += size
            if size > LONG_RESPONSE:
                await asyncio.to_thread(builder.add, index, output)
            else:
                builder.add(index, output)
    return await asyncio.to_thread(encoded) if total > LONG_RESPONSE else encoded()


LONG_RESPONSE: Final = 1024
"""Tokens and candidates of tokens from which a response is built in a thread; each takes up to some microseconds."""


def _size(output: RequestOutput) -> int:
    """Return the tokens of an output, with their candidates, and those of its prompt if that is in the response."""
    size = 0 if output.prompt_logprobs is None else _candidates(output.prompt_logprobs)
    for completion in output.outputs:
        size += len(completion.token_ids)
        if completion.logprobs:
            size += _candidates(completion.logprobs)
    return size


def _candidates(positions: PromptLogprobs | SampleLogprobs) -> int:
    """Return about how many logprobs there are; the last position has as many as most."""
    return len(positions) * len(positions[-1] or ())


async def _events(
    source: OutputSource, builder: ResponseBuilder, style: EventStyle, *, pause: float, log_errors: bool
) -> AsyncGenerator[bytes, None]:
    """Yield encoded events. An error before the first one is raised; a later one becomes the last event.

    `pause`: seconds without output after which a keep-alive comment is sent; 0: never.
    """
    started = False
    try:
        items = source.outputs()
        async with aclosing(with_pauses(items, pause) if pause else items) as outputs:
            async for item in outputs:
                if item is None:
                    data = style.keep_alive
                elif item[1].prompt_logprobs is None:
                    data = b"".join(map(style.event, builder.chunks(*item)))
                else:
                    data = await _encoded(builder, style, *item)
                if data:
                    started = True
                    yield data
        last = builder.usage_chunk()
        yield style.done if last is None else style.event(last) + style.done
    except Exception as error:
        if not started:
            raise
        if log_errors or not isinstance(error, PagodaError):
            logger.exception("request %s failed", source.request_id)
        yield style.failure(error)


async def _encoded(builder: ResponseBuilder, style: EventStyle, prompt_index: int, output: RequestOutput) -> bytes:
    """Return the events of an output, made in a thread if that takes long."""

    def encode() -> bytes:
        return b"".join(map(style.event, builder.chunks(prompt_index, output)))

    return await asyncio.to_thread(encode) if _size(output) > LONG_RESPONSE else encode()


async def with_pauses(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None after every `seconds` without one (0: never). Closes `items`."""
    async with aclosing(items):
        if not seconds:
            async for item in items:
                yield item
            return
        pending: asyncio.Future[T] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(items))
                done, _ = await asyncio.wait({pending}, timeout=seconds)
                if not done:
                    yield None
                    continue
                item = pending.result()
                pending = None
                yield item
        except StopAsyncIteration:
            pass
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


async def cancel_on_disconnect(receive: Receive, stopping: StopSignal, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects or `stopping` is set.

    The request body must have been read. Raise ClientDisconnectedError, UnavailableError or what `work` raises.

    `work` runs in a separate task: it is resumed per token, and in the caller's task each resumption would pass
    through all middleware coroutines.
    """
    task = asyncio.ensure_future(work)
    causes: list[Exception] = []

    def cancel_with(error: Exception) -> None:
        if not causes:  # only once, so that the clean-up of `work` is not cancelled too
            causes.append(error)
            task.cancel()

    disconnect = asyncio.ensure_future(_disconnected(receive))
    disconnect.add_done_callback(lambda _: cancel_with(ClientDisconnectedError()))
    try:
        with stopping.notifying(lambda: cancel_with(UnavailableError("the server is shutting down"))):
            return await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not causes or (caller is not None and caller.cancelling()):  # cancelled from outside
            raise
        raise causes[0] from None
    finally:
        disconnect.cancel()


class DisconnectMiddleware:
    """Ends the handling of a request whose client disconnects before its response begins: what prepares it, such as
    tokenising a long prompt, is cancelled.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        watch: asyncio.Future[None] | None = None  # of the connection, once the body has been read
        is_preparing = True
        is_cancelled = False

        def end(_: object) -> None:
            nonlocal is_cancelled
            if is_preparing:
                is_cancelled = task.cancel()

        async def receive_body() -> Message:
            nonlocal watch
            if watch is not None:
                await asyncio.shield(watch)
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                watch = asyncio.ensure_future(_disconnected(receive))
                watch.add_done_callback(end)
            return message

        async def send_response(message: Message) -> None:
            nonlocal is_preparing
            is_preparing = False
            await send(message)

        try:
            await self._app(scope, receive_body, send_response)
        except asyncio.CancelledError:
            if not is_cancelled or task.uncancel():  # cancelled from outside
                raise
            await Response(status_code=CLIENT_DISCONNECTED)(scope, receive, send)
        finally:
            is_preparing = False
            if watch is not None:
                watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


DIRECT_SEND: Final = "pagoda.direct_send"
"""Scope key of the `send` outside pagoda's own middleware, which only looks at the start of a response: sending a
stream's chunks through it would cost several coroutines per token."""


KEEP_STREAM: Final = "pagoda.keep_stream"
"""Scope key of what returns a context in which another process sends the given event if this process is killed."""


class EventStream(Response):
    """Sends `first` and the events that follow; their generator is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        stopping: StopSignal,
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
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep = scope.get(KEEP_STREAM, nullcontext)
        try:
            with keep(self._style.lost):
                await cancel_on_disconnect(receive, self._stopping, self._send_all(scope.get(DIRECT_SEND, send)))
        except ClientDisconnectedError:
            return
        except UnavailableError as error:
            await send({"type": "http.response.body", "body": self._style.failure(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
