"""The uvicorn server: TLS with certificate reload, root path, access log filter; signals are left to the command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.http.connection import BoundedProtocol

# TLS key and certificate.

POLL_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


def check(config: ServerConfig) -> None:
    """Raise ConfigError naming the flag whose file or value is invalid."""
    context = _context()
    if config.ssl_certfile is not None:
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError("--ssl-certfile", f"{config.ssl_certfile}: {_reason(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{config.ssl_ca_certs}: {_reason(error)}") from None
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError("--ssl-ciphers", f"{config.ssl_ciphers}: unknown to OpenSSL") from None


async def refresh(context: ssl.SSLContext, config: ServerConfig) -> NoReturn:
    """Reload the files into `context` whenever one changes, forever, for new connections.

    Files that do not match, as while one of them is being written, are not loaded.
    """
    seen = _stamps(config)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = _stamps(config)
        if now == seen:
            continue
        seen = now
        try:
            _load(_context(), config)
            _load(context, config)
        except OSError as error:
            logger.warning("the TLS files changed but are not valid yet: %s", _reason(error))
        else:
            logger.info("the TLS files changed: new connections use the new certificate")


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _load(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None, "checked by ServerConfig"
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)


def _stamps(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """Return (mtime, size, inode) of each file; None for a missing one."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs):
        try:
            stat = os.stat(path) if path is not None else None
        except OSError:
            stat = None
        stamps.append(None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return stamps


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


FLUSH_SECONDS: Final = 2
"""How long the last responses may take to be sent at shutdown."""

_ACCESS_LOG: Final = "uvicorn.access"


def http_server(app: FastAPI, config: ServerConfig) -> HttpServer:
    """Return a server for the application. Raise ConfigError for invalid certificates."""
    check(config)
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
        """Handle one request."""
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
        refreshing = None
        if self._config.enable_ssl_refresh and self.config.ssl is not None:
            refreshing = asyncio.ensure_future(refresh(self.config.ssl, self._config))
        silent = _SilentPaths(self._config.disable_access_log_for_endpoints, self._config.prefix)
        logging.getLogger(_ACCESS_LOG).addFilter(silent)
        try:
            await super().serve(sockets)
        finally:
            logging.getLogger(_ACCESS_LOG).removeFilter(silent)
            if refreshing is not None:
                refreshing.cancel()


class _SilentPaths(logging.Filter):
    """Excludes paths from the access log, with and without the root path."""

    def __init__(self, paths: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self._paths = frozenset(paths) | frozenset(prefix + path for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log. uvicorn's args: client, method, path with query, HTTP version, status."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)
