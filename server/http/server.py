"""uvicorn as pagoda runs it: signals are left to the command, certificates may change, some paths are not logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import uvicorn

from pagoda.common.config.server import ServerConfig
from pagoda.server.http import tls
from pagoda.server.http.connection import BoundedProtocol

FLUSH_SECONDS: Final = 2
"""How long the last answers may take to reach their clients."""

_ACCESS_LOG: Final = "uvicorn.access"


def http_server(app: Any, config: ServerConfig) -> HttpServer:
    """A server for an ASGI application. Raises ConfigError for certificates that cannot be used."""
    tls.check(config)
    settings = uvicorn.Config(
        app,
        loop="auto",
        http=partial(BoundedProtocol, config),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        root_path=config.root_path,
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
            refreshing = asyncio.ensure_future(tls.refresh(self.config.ssl, self._config))
        silent = _SilentPaths(self._config.disable_access_log_for_endpoints, self._config.root_path)
        logging.getLogger(_ACCESS_LOG).addFilter(silent)
        try:
            await super().serve(sockets)
        finally:
            logging.getLogger(_ACCESS_LOG).removeFilter(silent)
            if refreshing is not None:
                refreshing.cancel()


class _SilentPaths(logging.Filter):
    """Keeps requests for some paths out of the access log, with and without the prefix that a proxy strips."""

    def __init__(self, paths: tuple[str, ...], root_path: str) -> None:
        super().__init__()
        self._paths = frozenset(paths) | frozenset(root_path + path for path in paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn logs (client, method, path with query, HTTP version, status)."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)
