"""HTTP responses, whole and streamed, and the ASGI middleware that surrounds every response.

Whole and streamed responses are built from the same outputs, and end when the client disconnects or the server stops.
In this order: builders of responses, headers, events of streams, `respond`, disconnects, middleware.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.engine.messages import EngineStats
from pagoda.common.errors import PagodaError, QueueFullError
from pagoda.common.observe.metrics import Metrics
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import IGNORED_STATE, Ignored, note_ignored
from pagoda.server.http.errors import (
    LOST,
    ClientDisconnectedError,
    HttpError,
    UnavailableError,
    error_response,
    http_error,
    response_error_event,
)
from pagoda.server.http.fields import SamplingFields, TokenNames
from pagoda.server.http.generation import num_prompt_tokens
from pagoda.server.http.state import MAX_ID_LENGTH, OWNER, ServerState, StopSignal
from pagoda.server.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs

if TYPE_CHECKING:
    from pagoda.common.observe.tracing import Tracer

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

    id: str
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
        self._details = details  # Report cached prompt tokens.
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


# What chat and text completions have in common, and their best_of.

_MARK: Final = "\ufdd0"
"""Placeholder of the text in an event's frame: no other string of the frame is exactly this noncharacter."""


class TextEvent:
    """Encodes stream events that differ in one text only, as most tokens' do: the frame is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        parts = encode_json(chunk(_MARK)).split(encode_json(_MARK))
        self._before = b"data: " + parts[0]
        self._after = parts[-1] + b"\n\n"

    def __call__(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + encode_json(text) + self._after


class CompletionBuilder(ResponseBuilder):
    """Base of the builders of chat and text completions."""

    whole_object: ClassVar[str]  # Value of `object` in a whole response.
    chunk_object: ClassVar[str]  # Value of `object` in a chunk of a stream.

    def __init__(
        self, request: SamplingFields, response_id: str, model: str, config: ServerConfig, tokenizer: Tokenizer | None
    ) -> None:
        self.usage = Usage(details=config.enable_prompt_tokens_details or request.gives_cache_key)
        self._id = response_id
        self._created = int(time.time())
        self._model = model
        self._n = request.n or 1
        as_ids = request.return_tokens_as_token_ids
        self._as_ids = config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._tokenizer = tokenizer
        options = request.stream_options or None  # Of batches, which are not streamed, it is at most {}.
        self._reports_usage = config.enable_force_include_usage or bool(options is not None and options.include_usage)
        self._reports_running_usage = config.enable_force_include_usage or (
            self._reports_usage and options is not None and bool(options.continuous_usage_stats)
        )

    @cached_property
    def _names(self) -> TokenNames:
        return TokenNames(self._tokenizer, as_ids=bool(self._as_ids))

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the last chunk of a stream, without choices; None when usage is not reported."""
        return self._frame(self.chunk_object, []) | {"usage": self.usage.as_dict()} if self._reports_usage else None

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        """Return the index of a choice: n per prompt."""
        return prompt_index * self._n + completion.index

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a stream chunk; its usage is null if only the last chunk reports it."""
        chunk = self._frame(self.chunk_object, [choice])
        if self._reports_usage:
            chunk["usage"] = self.usage.as_dict() if self._reports_running_usage else None
        return chunk

    def _whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a whole response; fields that only other servers set are null."""
        unset = dict.fromkeys(
            ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
        )
        usage = {"prompt_tokens_details": None, "completion_tokens_details": None} | self.usage.as_dict()
        return self._frame(self.whole_object, choices) | unset | {"usage": usage}


def best_of(builder: CompletionBuilder, body: SamplingFields) -> ResponseBuilder:
    """Return a builder that keeps the n best of `best_of` choices, if requested."""
    return BestOf(builder, body.n or 1, builder.usage) if body.selects_best else builder


class BestOf:
    """A ResponseBuilder that keeps the `n` choices with the highest cumulative log-probability. Not for streams."""

    def __init__(self, builder: ResponseBuilder, n: int, usage: Usage) -> None:
        self._builder = builder
        self._n = n
        self._usage = usage  # It counts the dropped choices, too.

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """Raise: the best are only known at the end."""
        raise NotImplementedError("best_of is not streamed")

    def usage_chunk(self) -> dict[str, Any] | None:
        return self._builder.usage_chunk()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add the best choices of a final output."""
        ranked = sorted(output.outputs, key=_negative_logprob)
        kept = ranked[: self._n]
        dropped = ranked[self._n :]
        self._usage.count_dropped(sum(len(output.token_ids) for output in dropped))
        outputs = [replace(output, index=index) for index, output in enumerate(kept)]
        self._builder.add(prompt_index, replace(output, outputs=outputs))

    def whole(self) -> dict[str, Any]:
        return self._builder.whole()


def _negative_logprob(choice: CompletionOutput) -> float:
    return -(choice.cumulative_logprob or 0.0)


# Response headers.

REQUEST_ID_HEADER: Final = "x-request-id"

_PLAIN: Final = " !#$&'()*+,/:;=?@[]~"
"""Characters of an id that are not percent-encoded in a header, besides letters, digits and _.-"""


def id_header(request_id: str) -> dict[str, str]:
    """Return the X-Request-Id header, with unsafe characters of a client's id percent-encoded."""
    return {REQUEST_ID_HEADER: quote(request_id, safe=_PLAIN, errors="replace")}


# Engine load for load balancers: Open Request Cost Aggregation (ORCA), as in vLLM.

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"  # A request header: TEXT or JSON.
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
KEEP_ALIVE: Final = b": keep-alive\n\n"  # A comment: clients ignore it, and it keeps proxies from timing out.


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


LOST_RESPONSE: Final = named_event(response_error_event(LOST))
"""The end of a stream of the Responses API whose process is killed. Nobody else knows its sequence number."""


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How an API encodes its streams."""

    event: Callable[[Any], bytes] = event
    failure: Callable[[BaseException], bytes] = error_event  # End of a failed stream.
    done: bytes = DONE  # End of a complete stream.
    lost: bytes = error_event(LOST)  # End of a stream whose process is killed: another process sends it.
    keep_alive: bytes = KEEP_ALIVE


COMPLETION_STYLE: Final = EventStyle()  # Unnamed events, then [DONE].


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
        headers |= id_header(source.id)
    if not stream:
        content = await cancel_on_disconnect(request.receive, state.stopping, _whole(source, builder))
        headers |= load_report(request.headers.get(LOAD_FORMAT_HEADER), state.engine.stats)
        return Response(content, headers=headers, media_type=JSON)
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
                    prompt_index, output = item
                    data = await _encoded(builder, style, prompt_index, output)
                if data:
                    started = True
                    yield data
        last = builder.usage_chunk()
        yield style.done if last is None else style.event(last) + style.done
    except Exception as error:
        if not started:
            raise
        if log_errors or not isinstance(error, PagodaError):
            logger.exception("request %s failed", source.id)
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
                finished, _ = await asyncio.wait({pending}, timeout=seconds)
                if not finished:
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
        if not causes:  # This happens once, so that the clean-up of `work` is not cancelled too.
            causes.append(error)
            task.cancel()

    disconnect = asyncio.ensure_future(_disconnected(receive))
    disconnect.add_done_callback(lambda _: cancel_with(ClientDisconnectedError()))
    try:
        with stopping.notifying(lambda: cancel_with(UnavailableError("the server is shutting down"))):
            return await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not causes or (caller is not None and caller.cancelling()):  # The task was cancelled from outside.
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
        watch: asyncio.Future[None] | None = None  # It watches the connection, once the body has been read.
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
            if not is_cancelled or task.uncancel():  # The task was cancelled from outside.
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


# ASGI middleware: methods and slashes, API keys, X-Request-Id, x-pagoda-ignored, and direct sending of stream chunks.

OPEN_PATHS: Final = frozenset({"/", "/docs", "/redoc", "/health", "/ready", "/ping", "/version", "/metrics", "/load"})
"""Paths without a key: probes, scrapers, and the pages, which ask for a key. None shows a prompt or runs one."""

OWNER_KEY: Final = "pagoda.owner"
"""Key of the ASGI scope under which the digest of the request's API key is; set for requests made in this process."""


def owner_of(scope: Scope) -> bytes:
    """Return the digest of the request's API key; empty if the server has no keys."""
    owner = scope.get(OWNER_KEY, b"")
    assert isinstance(owner, bytes)
    return owner


KEY_HEADERS: Final = ("x-api-key", "api-key")
"""Headers that have an API key, beside Authorization."""


class ApiKeyMiddleware:
    """Requires one of the keys on every path but OPEN_PATHS, compared with the routed path.

    Accepts `Authorization: Bearer KEY`, `X-API-Key: KEY` of clients of the Messages API, and `api-key: KEY` of clients
    of Azure.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = None if scope["type"] == "lifespan" else scope.get(OWNER_KEY) or self._digest(scope)
        if owner is not None:
            scope[OWNER_KEY] = owner
            OWNER.set(owner)
        if scope["type"] == "lifespan" or self._is_open(scope) or owner is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = HttpError(401, "missing or invalid API key; send the header Authorization: Bearer KEY")
            body, headers = error_response(get_route_path(scope), error)
            headers["www-authenticate"] = "Bearer"
            await json_response(body, 401, headers)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and get_route_path(scope) in OPEN_PATHS

    def _digest(self, scope: Scope) -> bytes | None:
        """Return the digest of the request's key; None without a valid one."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = key if scheme.lower() == "bearer" else ""
        digests = [self._match(sent) for sent in (bearer, *(headers.get(name, "") for name in KEY_HEADERS))]
        return next((digest for digest in digests if digest is not None), None)

    def _match(self, key: str) -> bytes | None:
        """Return the key's digest if it is valid. Compares with all keys, each in constant time."""
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known_digest) for known_digest in self._digests]
        return digest if any(matches) else None


class RequestIdMiddleware:
    """Sets X-Request-Id on each response: the request's header, else the id set by the route, else a random one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")[:MAX_ID_LENGTH]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if request_id:
                    headers.update(id_header(request_id))
                else:
                    headers.setdefault(REQUEST_ID_HEADER, uuid.uuid4().hex)
            await send(message)

        await self._app(scope, receive, send_with_id)


IGNORED_HEADER: Final = "x-pagoda-ignored"
MAX_HEADER_NAMES: Final = 32
"""Maximum number of names in one header; the number of further ones is appended."""

MAX_HEADER_BYTES: Final = 2048
"""Maximum size of the names in the header: proxies refuse responses with long headers."""

_MAX_NAME: Final = 100
_UNQUOTED: Final = "[]=.-_/:+@"
"""Characters of a name that are not percent-encoded in the header."""


def header_value(ignored: Iterable[Ignored]) -> str:
    """Return the distinct names of ignored parts as printable ASCII: `client_metadata, input[].phase, +3 more`."""
    names = list(dict.fromkeys(quote(field.name[:_MAX_NAME], safe=_UNQUOTED, errors="replace") for field in ignored))
    shown: list[str] = []
    left = MAX_HEADER_BYTES
    for name in names[:MAX_HEADER_NAMES]:
        left -= len(name) + 2
        if left < 0:
            break
        shown.append(name)
    more = len(names) - len(shown)
    return ", ".join(shown + ([f"+{more} more"] if more > 0 else []))


class TraceContextMiddleware:
    """Makes the span of the `traceparent` header the parent of the request's; with --otlp-traces-endpoint."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._tracer.within(Headers(scope=scope)):
            await self._app(scope, receive, send)


class OverloadMiddleware:
    """Answers requests that would be queued during an overload before they are routed, read and parsed: a refusal takes
    time from those that run.

    `check`: raises QueueFullError during an overload; `paths`: of requests that are queued; `answer`: returns the
    response of an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        check: Callable[[], None],
        paths: Container[str],
        answer: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._check = check
        self._paths = paths
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and get_route_path(scope) in self._paths:
            try:
                self._check()
            except QueueFullError as error:
                response = await self._answer(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class IgnoredPartsMiddleware:
    """Sets x-pagoda-ignored on responses to requests with ignored parts, and logs and counts those."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            ignored = scope.get("state", {}).get(IGNORED_STATE)
            if ignored and message["type"] == "http.response.start":
                value = header_value(ignored)
                MutableHeaders(scope=message)[IGNORED_HEADER] = value
                logger.debug("%s %s: ignored %s", scope["method"], quote(scope["path"]), value)
                self._metrics.on_ignored(field.kind for field in ignored)
            await send(message)

        await self._app(scope, receive, send_with_header)


class RouteSpellingMiddleware:
    """Answers HEAD as GET, whose body uvicorn leaves out, and a path with a slash at its end as without it.

    Outside of everything that compares paths, so that no check sees another path than the one that is routed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = get_route_path(scope)
            method = scope["method"]
            if len(path) > 1 and path[-1] == "/" and path[-2] != "/":
                scope = {**scope, "path": scope["path"][:-1]}
            if method == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class DirectSendMiddleware:
    """Lets EventStream send chunks past the middleware inside of this one, see DIRECT_SEND."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)
