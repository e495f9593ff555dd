"""uvicorn as pagoda runs it: signals are left to the command, certificates may change, some paths are not logged."""

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

# Key and certificate: tried before the server uses them, and loaded again when their files change.

POLL_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


def check(config: ServerConfig) -> None:
    """Raise ConfigError naming the flag whose file or value cannot be used."""
    context = _context()
    if config.ssl_certfile is not None:
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError("--ssl-certfile", f"{config.ssl_certfile}: {_shown(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{config.ssl_ca_certs}: {_shown(error)}") from None
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError("--ssl-ciphers", f"{config.ssl_ciphers}: OpenSSL knows no such cipher") from None


async def refresh(context: ssl.SSLContext, config: ServerConfig) -> NoReturn:
    """Load the files into `context` whenever one changes, for ever; new connections get what they hold then.

    Files that do not go together, as when one of two is written, leave everything as it is.
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
            logger.warning("the certificate's files changed, but cannot be used yet: %s", _shown(error))
        else:
            logger.info("the certificate's files changed: new connections get the new one")


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _load(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None, "ServerConfig sees to it"
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)


def _stamps(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """What tells one version of each file from another; None for a file that is not there."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs):
        try:
            about = os.stat(path) if path is not None else None
        except OSError:
            about = None
        stamps.append(None if about is None else (about.st_mtime_ns, about.st_size, about.st_ino))
    return stamps


def _shown(error: OSError) -> str:
    return error.strerror or str(error)


FLUSH_SECONDS: Final = 2
"""How long the last answers may take to reach their clients."""

_ACCESS_LOG: Final = "uvicorn.access"


def http_server(app: FastAPI, config: ServerConfig) -> HttpServer:
    """A server for an ASGI application. Raises ConfigError for certificates that cannot be used."""
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
    """Serves `app` with and without `prefix` before its paths: the proxy in front may strip it, or leave it.

    Both become the same ASGI scope, `root_path` the prefix and `path` with it, before anything looks at a path: keys,
    routes, pages and middleware cannot tell them apart. One prefix is taken off, and only at a slash; where the app
    has a route of that very name (`--root-path /v1`), the request is for the route.
    """

    def __init__(self, app: FastAPI, prefix: str) -> None:
        self._app: ASGIApp = app
        self._prefix = prefix
        self._alike = [compile_path(path)[0] for path in _paths(app) if path.startswith(prefix)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under the prefix."""
        if "path" in scope:
            path = self._without_prefix(scope["path"])
            scope = {**scope, "root_path": self._prefix, "path": self._prefix + path}
        await self._app(scope, receive, send)

    def _without_prefix(self, path: str) -> str:
        rest = path.removeprefix(self._prefix)
        if rest == path or any(alike.match(path) for alike in self._alike):
            return path
        return rest if rest.startswith("/") else path if rest else "/"


def _paths(app: FastAPI) -> Iterator[str]:
    """The path of every route, also of those in a router that FastAPI keeps whole."""
    for route in app.routes:
        inner: Any = getattr(route, "effective_route_contexts", None)
        found: Iterable[Any] = (route,) if inner is None else inner()
        for each in found:
            yield each.path


class HttpServer(uvicorn.Server):
    """Ends when `should_exit` is set."""

    def __init__(self, settings: uvicorn.Config, config: ServerConfig) -> None:
        super().__init__(settings)
        self._config = config

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until told to end."""
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
    """Keeps requests for some paths out of the access log, with and without the prefix that a proxy may strip."""

    def __init__(self, paths: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self._paths = frozenset(paths) | frozenset(prefix + path for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn logs (client, method, path with query, HTTP version, status)."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)
