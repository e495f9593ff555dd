"""Starts an engine in its own process or in a thread, with a client for the API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.server.core_client.client import EngineClient

if TYPE_CHECKING:
    from pagoda.server.core_client.process_client import ProcessClient

ClientT = TypeVar("ClientT", bound=EngineClient)


def start_engine(config: EngineConfig, *, in_process: bool) -> EngineClient:
    """Start an engine in a thread of this process or in its own process, for this process's requests.

    General plugins run in both processes; the engine itself runs them in its own. Raises ConfigError if one fails, and
    on a host that takes no requests.
    """
    check_first_host(config)
    check_restarts(config, in_process=in_process)
    if in_process:
        from pagoda.server.core_client.engine import ThreadClient

        return ThreadClient(config)
    if restarts := config.runtime.restart_engine:
        from pagoda.server.core_client.process_client import ProcessClient
        from pagoda.server.core_client.restarting import RestartingClient

        return _with_plugins(config, RestartingClient(lambda: ProcessClient(config), restarts))
    return start_shared_engine(config, clients=0)


def start_shared_engine(config: EngineConfig, *, clients: int) -> ProcessClient:
    """Start an engine in its own process, for as many SharedClients. Raises as start_engine does."""
    check_first_host(config)
    from pagoda.server.core_client.process_client import ProcessClient

    return _with_plugins(config, ProcessClient(config, clients=clients))


def _with_plugins(config: EngineConfig, client: ClientT) -> ClientT:
    """Run the general plugins and return the client of the engine that starts meanwhile."""
    from pagoda.server.plugins import load_general_plugins

    try:
        load_general_plugins(config)
    except BaseException:
        client.close()
        raise
    return client


def check_start(config: EngineConfig, *, in_process: bool) -> None:
    """Raise ConfigError where `start_engine` would; `check_engine` runs the plugins."""
    check_first_host(config)
    check_restarts(config, in_process=in_process)
    if not in_process:
        from pagoda.server.core_client.process_client import check_folder

        check_folder(config.runtime)


def check_restarts(config: EngineConfig, *, in_process: bool) -> None:
    """Raise ConfigError for --restart-engine where an engine cannot be replaced alone."""
    if not config.runtime.restart_engine:
        return
    if in_process:
        raise ConfigError(
            "--restart-engine", "needs the engine in its own process; drop it or --disable-frontend-multiprocessing"
        )
    if config.parallel.nnodes > 1:
        raise ConfigError("--restart-engine", "the other hosts end with the engine; drop it and restart all hosts")


def check_first_host(config: EngineConfig) -> None:
    """Raise ConfigError on a host that takes no requests."""
    if config.parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            "requests go to host 0; on the others run pagoda serve MODEL --headless with the flags of host 0",
        )
