"""Who can be reached, and whether this server could be."""

from __future__ import annotations

import urllib.request
from typing import Final

from pagoda.common.config import env
from pagoda.common.config.doctor import DoctorConfig
from pagoda.common.config.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.commands.checks.finding import Finding, Findings

HUB_SECONDS: Final = 5.0


def port(config: DoctorConfig) -> Findings:
    """Whether the server could listen."""
    from pagoda.server.commands.serve import bind

    server = ServerConfig(host=config.host, port=config.port)
    try:
        bind(server).close()
    except ConfigError as error:
        yield Finding("fail", "port", str(error))
    else:
        yield Finding("ok", "port", f"{server.address}:{config.port} is free")


def hub(config: DoctorConfig) -> Findings:
    """Whether models can be fetched."""
    if env.HF_HUB_OFFLINE.is_on():
        yield Finding("ok", "hub", "HF_HUB_OFFLINE is set: only models that were downloaded before")
        return
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_SECONDS):
            yield Finding("ok", "hub", "reachable")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding(
            "warn",
            "hub",
            f"not reachable ({reason}); check network and proxy, or serve local files with HF_HUB_OFFLINE=1",
        )
