"""The uvicorn server and what surrounds the application in it.

From the outside in: TLS with certificate reload, connections with limits (`connections`), the root path, and
ASGI middleware. Signals are left to the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError, QueueFullError
from pagoda.common.observe.metrics import Metrics
from pagoda.server.http.body import IGNORED_STATE, Ignored
from pagoda.server.http.connections import (
    ACCEPTED_AT_ONCE,
    Acceptor,
    BoundedProtocol,
    Connections,
    LimitedLog,
    max_connections,
)
from pagoda.server.http.errors import HttpError, error_response
from pagoda.server.http.response import DIRECT_SEND, REQUEST_ID_HEADER, id_header, json_response
from pagoda.server.http.state import MAX_ID_LENGTH, OWNER

if TYPE_CHECKING:
    from pagoda.common.observe.tracing import Tracer

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 2
"""How long the last responses may take to be sent at shutdown."""

CUT_SECONDS: Final = 1
"""How long requests may take to end after their connections were closed at shutdown."""

_POLL_SECONDS: Final = 0.02
_ACCESS_LOG: Final = "uvicorn.access"
_ERROR_LOG: Final = "uvicorn.error"


def http_server(
    app: FastAPI,
    config: ServerConfig,
    *,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    at_once: int = ACCEPTED_AT_ONCE,
) -> HttpServer:
    """Return a server for the application, which `wrap` may wrap. Raise ConfigError for invalid certificates."""
    tls = None if config.ssl_certfile is None else Tls(config)
    served: ASGIApp = RootPath(app, config.prefix) if config.prefix else app
    settings = uvicorn.Config(
        served if wrap is None else wrap(served),
        loop="auto",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,  # type: ignore[arg-type]
    )
    settings.load()
    return HttpServer(settings, config, at_once=at_once, lifespan=lambda: app.router.lifespan_context(app), tls=tls)


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
    """A uvicorn server that stops when `should_exit` is set. `at_once`: see Acceptor.

    `lifespan`: returns the context in which the application serves.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        config: ServerConfig,
        at_once: int = ACCEPTED_AT_ONCE,
        lifespan: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(settings)
        self._config = config
        self._tls = tls
        self._at_once = at_once
        self._lifespan = lifespan
        self._connections = Connections()
        self._acceptors: list[Acceptor] = []
        self.private: socket.socket | None = None  # without TLS, whatever the others have
        self.num_cut = 0  # requests whose response was not complete when the server stopped

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the command handles signals."""
        yield

    @property
    def num_requests(self) -> int:
        """Number of requests that are being answered."""
        return len(self.server_state.tasks)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set."""
        reloading = None
        if self._config.enable_ssl_refresh and self._tls is not None:
            reloading = asyncio.ensure_future(self._tls.refresh())
        filters: list[tuple[str, logging.Filter]] = [
            (_ACCESS_LOG, _SilentPaths(self._config.disable_access_log_for_endpoints, self._config.prefix)),
            (_ERROR_LOG, _LimitedWarnings()),
        ]
        for name, each in filters:
            logging.getLogger(name).addFilter(each)
        try:
            async with self._lifespan():
                await super().serve(sockets)
        finally:
            for name, each in filters:
                logging.getLogger(name).removeFilter(each)
            if reloading is not None:
                reloading.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections on the sockets, which must be bound."""
        limit = max_connections(self._config)
        self._acceptors = [
            Acceptor(
                *(each, self._protocol, self._connections),
                limit=limit,
                handshake_seconds=self._config.timeout_headers,
                tls=None if self._tls is None or each is self.private else self._tls.current,
                at_once=self._at_once,
            )
            for each in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, close those that wait, and others after their response, at the latest
        FLUSH_SECONDS later; requests that this cuts are added to `num_cut`.
        """
        for acceptor in self._acceptors:
            acceptor.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if await self._finished(FLUSH_SECONDS):
            return
        self.num_cut = len(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.cut()  # type: ignore[union-attr]
        if await self._finished(CUT_SECONDS):
            return
        logger.warning("%d requests did not end; they are cancelled", len(self.server_state.tasks))
        for task in self.server_state.tasks:
            task.cancel()

    async def _finished(self, seconds: float) -> bool:
        """Return whether all connections and requests end within `seconds`."""
        end = time.monotonic() + seconds
        while self.server_state.connections or self.server_state.tasks:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def _protocol(self, only_probes: bool) -> BoundedProtocol:
        return BoundedProtocol(
            *(self._config, self._connections),
            only_probes=only_probes,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )


class _SilentPaths(logging.Filter):
    """Excludes paths from the access log, with and without the root path."""

    def __init__(self, paths: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self._paths = frozenset(paths) | frozenset(prefix + path for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log. uvicorn's args: client, method, path with query, HTTP version, status."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)


class _LimitedWarnings(logging.Filter):
    """Passes errors, except of cancelled requests, and once in a while warnings, which invalid requests cause."""

    def __init__(self) -> None:
        super().__init__()
        self._log = LimitedLog()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        if record.levelno == logging.WARNING:
            self._log.warn(record.getMessage())
            return False
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


# TLS.

TLS_POLL_SECONDS: Final = 1.0


class Tls:
    """The certificates of new connections. Raises ConfigError naming the flag whose file or value is invalid."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stamps = _tls_stamps(config)
        self._context = tls_context(config)
        if config.ssl_ca_certs is not None and not config.ssl_cert_reqs:
            logger.info("clients are not asked for certificates: --ssl-cert-reqs is 0")

    def current(self) -> ssl.SSLContext:
        """Return the context of a connection that opens now."""
        return self._context

    async def refresh(self) -> NoReturn:
        """Replace the context whenever a file changes, forever.

        A context of its own for each state of the files, since one forgets neither authorities nor half a key pair.
        Files that do not match, because one is still being written, leave the context as it is.
        """
        while True:
            await asyncio.sleep(TLS_POLL_SECONDS)
            previous = self._stamps
            self._stamps = _tls_stamps(self._config)
            if self._stamps == previous:
                continue
            try:
                self._context = tls_context(self._config)
            except ConfigError as error:
                logger.warning("the TLS files changed but are not valid yet: %s", error)
            else:
                logger.info("the TLS files changed: new connections use them")


def tls_context(config: ServerConfig) -> ssl.SSLContext:
    """Return a context of the files. Raises ConfigError naming the flag whose file or value is invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = config.ssl_certfile
    key = config.ssl_keyfile
    assert certificate is not None, "checked by ServerConfig"
    assert key is not None, "checked by ServerConfig"

    def refuse_password() -> NoReturn:  # without it OpenSSL asks for one on the terminal
        raise ConfigError("--ssl-keyfile", f"{key} is encrypted; remove its pass phrase: openssl pkey -in KEY -out NEW")

    for flag, path in (("--ssl-keyfile", key), ("--ssl-certfile", certificate)):
        _check_readable(flag, path)
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError("--ssl-certfile", f"{certificate} and {key}: {_os_message(error)}") from None
    if config.ssl_ca_certs is not None:
        _check_readable("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{config.ssl_ca_certs}: {_os_message(error)}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError("--ssl-ciphers", f"{config.ssl_ciphers}: unknown to OpenSSL") from None
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(flag, f"{path}: {_os_message(error)}") from None


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
        bearer = self._match(key)
        other = self._match(headers.get("x-api-key", ""))
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
