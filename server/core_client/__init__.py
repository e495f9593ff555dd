"""Starts an engine in its own process or in a thread, with a client for the API process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.server.core_client.client import EngineClient

if TYPE_CHECKING:
    from pagoda.server.core_client.process_client import ProcessClient


def start_engine(config: EngineConfig, *, in_process: bool) -> EngineClient:
    """Start an engine in a thread of this process or in its own process, for this process's requests.

    General plugins run in both processes; the engine itself runs them in its own. Raises ConfigError if one fails, and
    on a host that takes no requests.
    """
    check_first_host(config)
    if in_process:
        from pagoda.server.core_client.engine import ThreadClient

        return ThreadClient(config)
    return start_shared_engine(config, clients=0)


def start_shared_engine(config: EngineConfig, *, clients: int) -> ProcessClient:
    """Start an engine in its own process, for as many SharedClients. Raises as start_engine does."""
    check_first_host(config)
    from pagoda.server.core_client.process_client import ProcessClient
    from pagoda.server.plugins import load_general_plugins

    client = ProcessClient(config, clients=clients)
    try:
        load_general_plugins(config)
    except BaseException:
        client.close()
        raise
    return client


def check_start(config: EngineConfig, *, in_process: bool) -> None:
    """Raise ConfigError where `start_engine` would; `check_engine` runs the plugins."""
    check_first_host(config)
    if not in_process:
        from pagoda.server.core_client.process_client import check_folder

        check_folder(config.runtime)


def check_first_host(config: EngineConfig) -> None:
    """Raise ConfigError on a host that takes no requests."""
    if config.parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            "requests go to host 0; on the others run pagoda serve MODEL --headless with the flags of host 0",
        )
