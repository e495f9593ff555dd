"""Key and certificate: tried before the server uses them, and loaded again when their files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import Final, NoReturn

from pagoda.common.config.server import ServerConfig
from pagoda.common.errors import ConfigError

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
