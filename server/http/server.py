"""The uvicorn server and what surrounds the application in it.

From the outside in: TLS with certificate reload, connections with limits on size and time, the root path, and ASGI
middleware. Signals are left to the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import ssl
import uuid
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from hashlib import sha256
from typing import Any, Final, NoReturn
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.common.observe.metrics import Metrics
from pagoda.server.http.body import IGNORED_STATE, Ignored
from pagoda.server.http.errors import HttpError, error_response
from pagoda.server.http.response import DIRECT_SEND, REQUEST_ID_HEADER, encode_json, id_header, json_response
from pagoda.server.http.state import MAX_ID_LENGTH, OWNER

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 2
"""How long the last responses may take to be sent at shutdown."""

_ACCESS_LOG: Final = "uvicorn.access"


def http_server(app: FastAPI, config: ServerConfig) -> HttpServer:
    """Return a server for the application. Raise ConfigError for invalid certificates."""
    check_tls(config)
    settings = uvicorn.Config(
        RootPath(app, config.prefix) if config.prefix else app,
        loop="auto",
        http=partial(BoundedProtocol, config),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        timeout_keep_alive=config.timeout_keep_alive,  # type: ignore[arg-type]
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "",  # empty: OpenSSL's own choice
    )
    settings.load()
    return HttpServer(settings, config)


class RootPath:
    """Serves `app` with and without `prefix` before its paths, whether or not a proxy strips it.

    Both are normalised to the same ASGI scope, `root_path` = prefix and `path` including it, before middleware and
    routing. One prefix is stripped, at a slash only, unless the app itself has a matching route (`--root-path /v1`).
    """

    def __init__(self, app: FastAPI, prefix: str) -> None:
        self._app: ASGIApp = app
        self._prefix = prefix
        self._own_paths = [compile_path(path)[0] for path in _paths(app) if path.startswith(prefix)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            path = self._without_prefix(scope["path"])
            scope = {**scope, "root_path": self._prefix, "path": self._prefix + path}
        await self._app(scope, receive, send)

    def _without_prefix(self, path: str) -> str:
        stripped = path.removeprefix(self._prefix)
        if stripped == path or any(own.match(path) for own in self._own_paths):
            return path
        return stripped if stripped.startswith("/") else path if stripped else "/"


def _paths(app: FastAPI) -> Iterator[str]:
    """Yield the path of every route, including those of routers that FastAPI does not flatten."""
    for route in app.routes:
        inner: Any = getattr(route, "effective_route_contexts", None)
        routes: Iterable[Any] = (route,) if inner is None else inner()
        for each in routes:
            yield each.path


class HttpServer(uvicorn.Server):
    """A uvicorn server that stops when `should_exit` is set."""

    def __init__(self, settings: uvicorn.Config, config: ServerConfig) -> None:
        super().__init__(settings)
        self._config = config

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the command handles signals."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set."""
        reloading = None
        if self._config.enable_ssl_refresh and self.config.ssl is not None:
            reloading = asyncio.ensure_future(reload_tls(self.config.ssl, self._config))
        silent = _SilentPaths(self._config.disable_access_log_for_endpoints, self._config.prefix)
        logging.getLogger(_ACCESS_LOG).addFilter(silent)
        try:
            await super().serve(sockets)
        finally:
            logging.getLogger(_ACCESS_LOG).removeFilter(silent)
            if reloading is not None:
                reloading.cancel()


class _SilentPaths(logging.Filter):
    """Excludes paths from the access log, with and without the root path."""

    def __init__(self, paths: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self._paths = frozenset(paths) | frozenset(prefix + path for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log. uvicorn's args: client, method, path with query, HTTP version, status."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)


# TLS.

TLS_POLL_SECONDS: Final = 1.0


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError naming the flag whose file or value is invalid."""
    context = _tls_context()
    if config.ssl_certfile is not None:
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError("--ssl-certfile", f"{config.ssl_certfile}: {_os_message(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{config.ssl_ca_certs}: {_os_message(error)}") from None
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError("--ssl-ciphers", f"{config.ssl_ciphers}: unknown to OpenSSL") from None


async def reload_tls(context: ssl.SSLContext, config: ServerConfig) -> NoReturn:
    """Reload the files into `context` whenever one changes, forever, for new connections.

    Files that do not match, because one is still being written, are not loaded.
    """
    stamps = _tls_stamps(config)
    while True:
        await asyncio.sleep(TLS_POLL_SECONDS)
        previous, stamps = stamps, _tls_stamps(config)
        if stamps == previous:
            continue
        try:
            _load_tls(_tls_context(), config)
            _load_tls(context, config)
        except OSError as error:
            logger.warning("the TLS files changed but are not valid yet: %s", _os_message(error))
        else:
            logger.info("the TLS files changed: new connections use the new certificate")


def _tls_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _load_tls(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None, "checked by ServerConfig"
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)


def _tls_stamps(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """Return (mtime, size, inode) of each file; None for a missing one."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs):
        try:
            stat = os.stat(path) if path is not None else None
        except OSError:
            stat = None
        stamps.append(None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return stamps


def _os_message(error: OSError) -> str:
    return error.strerror or str(error)


# Connections with limits. uvicorn's httptools protocol has none: its parser buffers a header of any size, and an idle
# connection is never closed.

MIN_BODY_RATE: Final = 1024
"""Minimum average rate of a body in bytes per second, after a grace period of --timeout-body."""

LINGER_SECONDS: Final = 2.0
"""How long input is discarded after an early response, so that the client can read the response."""

UNREAD_SECONDS: Final = 300.0
"""How long a response waits for a client that does not read."""

MAX_PIPELINED: Final = 64
"""Maximum number of requests of a connection queued behind an earlier one."""


class _Reading(Enum):
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # between requests


class _RefusedError(Exception):
    """Raised in a parser callback to end the parsing."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Requests that exceed a limit get 408, 431 or 503 unless a response has begun."""

    def __init__(self, limits: ServerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._reading = _Reading.HEAD
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began = self._body_moved = 0.0
        self._timer: TimerHandle | None = None
        self._timed: _Reading | None = None
        self._unread: TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._discards = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._discards = True
            self._answer(HttpError(503, "the server has too many connections (--max-connections); try again"))
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data and check the size of the request head."""
        if self._discards:
            return
        if self._reading is _Reading.NOTHING:
            self._reading, self._head_bytes = _Reading.HEAD, 0
        before = self._reading, self._body_bytes
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if before[0] is _Reading.BODY:  # trailers and chunk extensions
            self._head_bytes = self._head_bytes + len(data) if (self._reading, self._body_bytes) == before else 0
        if self._head_bytes > self._limits.h11_max_incomplete_event_size:
            self._refuse(self._large_head())
        self._watch()

    def on_message_begin(self) -> None:
        """Start reading a request head."""
        super().on_message_begin()
        self._reading = _Reading.HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check the number of headers, and of trailers of a chunked body."""
        super().on_header(name, value)
        if len(self.headers) > self._limits.h11_max_header_count:
            limit = self._limits.h11_max_header_count
            self._refusal = HttpError(431, f"the request has more than {limit} headers (--h11-max-header-count)")
            raise _RefusedError

    def on_headers_complete(self) -> None:
        """Check the size of the head, then start reading the body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.h11_max_incomplete_event_size:
            self._refusal = self._large_head()
            raise _RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HttpError(503, f"more than {MAX_PIPELINED} requests are queued on this connection")
            raise _RefusedError
        super().on_headers_complete()
        self._reading, self._head_bytes, self._body_bytes = _Reading.BODY, 0, 0
        self._body_began = self._body_moved = self.loop.time()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        self._body_moved = self.loop.time()

    def on_message_complete(self) -> None:
        """Start the keep-alive timer if the request was answered before it was complete."""
        super().on_message_complete()
        self._reading, self._head_bytes = _Reading.NOTHING, 0
        if self.cycle.response_complete and not self.transport.is_closing():
            self._stop_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Close the connection soon if the rest of the request has not been sent."""
        super().on_response_complete()
        if self._reading is _Reading.BODY and not self._answering and not self.transport.is_closing():
            self._start_timer(LINGER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is invalid or that a callback refused."""
        self._refuse(self._refusal or HttpError(400, f"{msg.rstrip('.')}: the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer of a client that does not read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _large_head(self) -> HttpError:
        limit = self._limits.h11_max_incomplete_event_size
        return HttpError(431, f"the request head is larger than {limit} bytes (--h11-max-incomplete-event-size)")

    def _watch(self) -> None:
        """Run a timer while a request is incomplete; most arrive complete and need none."""
        if self._discards or self.transport.is_closing() or self._reading is self._timed:
            return
        if self._reading is _Reading.HEAD:
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif self._reading is _Reading.BODY and self._answering:
            self._start_timer(self._limits.timeout_body, self._check_body, _Reading.BODY)
        elif self._reading is _Reading.NOTHING:
            self._stop_timer()

    def _head_is_late(self) -> None:
        if self._answering:  # trailing bytes after a request, as some clients send
            self._start_timer(self._limits.timeout_headers, self._head_is_late, _Reading.HEAD)
        elif not self._head_bytes:
            self.transport.close()
        else:
            seconds = self._limits.timeout_headers
            self._refuse(HttpError(408, f"the request head took longer than {seconds:g} s (--timeout-headers)"))

    def _check_body(self) -> None:
        """Refuse a stalled or slow body. Time during which the server paused reading does not count."""
        now, seconds = self.loop.time(), self._limits.timeout_body
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._body_began, self._body_moved, self._body_bytes = now, now, 0
        late = now - self._body_moved >= seconds
        if late or self._body_bytes < MIN_BODY_RATE * (now - self._body_began - seconds):
            why = f"stalled for {seconds:g} s" if late else f"is slower than {MIN_BODY_RATE} bytes per second"
            self._refuse(HttpError(408, f"the request body {why} (--timeout-body)"))
        else:
            self._start_timer(self._body_moved + seconds - now, self._check_body, _Reading.BODY)

    def _refuse(self, error: HttpError) -> None:
        """Close the connection, with an error response unless a response has begun."""
        if self._discards or self.transport.is_closing():
            return
        logger.debug("%s: %s", self.client, error.message)
        self._discards = True
        begun = False
        if self._answering:
            begun = self._reading is not _Reading.BODY or self.cycle.response_started or bool(self.pipeline)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.transport.close()
            return
        self._answer(error)
        self.flow.resume_reading()
        self._start_timer(LINGER_SECONDS, self.transport.close)

    def _answer(self, error: HttpError) -> None:
        body = encode_json(error.as_dict())
        head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def _start_timer(self, seconds: float, then: Callable[[], None], timed: _Reading | None = None) -> None:
        self._stop_timer()
        self._timer, self._timed = self.loop.call_later(max(seconds, 0.05), then), timed

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None


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


class ApiKeyMiddleware:
    """Requires one of the keys on every path but OPEN_PATHS, compared with the routed path.

    Accepts `Authorization: Bearer KEY` and, for clients of the Messages API, `X-API-Key: KEY`.
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
    names = list(dict.fromkeys(quote(each.name[:_MAX_NAME], safe=_UNQUOTED, errors="replace") for each in ignored))
    shown: list[str] = []
    left = MAX_HEADER_BYTES
    for name in names[:MAX_HEADER_NAMES]:
        left -= len(name) + 2
        if left < 0:
            break
        shown.append(name)
    more = len(names) - len(shown)
    return ", ".join(shown + ([f"+{more} more"] if more > 0 else []))


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
                self._metrics.on_ignored(each.kind for each in ignored)
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
            path, method = get_route_path(scope), scope["method"]
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
