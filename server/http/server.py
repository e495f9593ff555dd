"""The uvicorn server and what surrounds the application in it.

From the outside in: TLS with certificate reload, connections with limits (`connections`), and the root path; the ASGI
middleware is in `response`. Signals are left to the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.http.connections import (
    ACCEPTED_AT_ONCE,
    Acceptor,
    BoundedProtocol,
    Connections,
    LimitedLog,
    max_connections,
)

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
        if stripped == path or any(own_path.match(path) for own_path in self._own_paths):
            return path
        return stripped if stripped.startswith("/") else path if stripped else "/"


def _paths(app: FastAPI) -> Iterator[str]:
    """Yield the path of every route, including those of routers that FastAPI does not flatten."""
    for route in app.routes:
        inner: Any = getattr(route, "effective_route_contexts", None)
        routes: Iterable[Any] = (route,) if inner is None else inner()
        for inner_route in routes:
            yield inner_route.path


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
        self.private: socket.socket | None = None  # It has no TLS, whatever the others have.
        self.num_cut = 0  # Number of requests whose response was not complete when the server stopped.

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
        for name, log_filter in filters:
            logging.getLogger(name).addFilter(log_filter)
        try:
            async with self._lifespan():
                await super().serve(sockets)
        finally:
            for name, log_filter in filters:
                logging.getLogger(name).removeFilter(log_filter)
            if reloading is not None:
                reloading.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections on the sockets, which must be bound."""
        limit = max_connections(self._config)
        make_protocol = partial(
            BoundedProtocol,
            self._config,
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state={},  # Each request copies it.
        )
        self._acceptors = [
            Acceptor(
                listener,
                make_protocol,
                self._connections,
                limit=limit,
                handshake_seconds=self._config.timeout_headers,
                tls=None if self._tls is None or listener is self.private else self._tls.current,
                at_once=self._at_once,
            )
            for listener in sockets or ()
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
    if certificate is None or key is None:
        raise ConfigError("--ssl-certfile", "TLS needs both --ssl-keyfile and --ssl-certfile")

    def refuse_password() -> NoReturn:  # Without it OpenSSL asks for a password on the terminal.
        raise ConfigError("--ssl-keyfile", f"{key} is encrypted; remove its pass phrase: openssl pkey -in KEY -out NEW")

    for flag, path in (("--ssl-keyfile", key), ("--ssl-certfile", certificate)):
        _check_readable(flag, path)
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except OSError as error:  # This includes ssl.SSLError.
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
