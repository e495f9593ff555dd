"""Starts engines in processes of their own or one in a thread, with a client for the API process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pagoda.backends.registry import choose_backend, device_env, num_engines
from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.server.core_client.client import EngineClient

if TYPE_CHECKING:
    from pagoda.server.core_client.process_client import ProcessClient
    from pagoda.server.core_client.replica_client import ReplicaClient

ClientT = TypeVar("ClientT", bound=EngineClient)


def start_engine(config: EngineConfig, *, in_process: bool) -> EngineClient:
    """Start the engines of a model in processes of their own, or one in a thread, for this process's requests.

    General plugins run in all processes; an engine itself runs them in its own. Raises ConfigError if one fails, and
    on a host that takes no requests.
    """
    check_first_host(config)
    check_restarts(config, in_process=in_process)
    if in_process:
        check_one_engine(config)
        from pagoda.server.core_client.engine import ThreadClient

        return ThreadClient(config)
    if not (restarts := config.runtime.restart_engine):
        return start_shared_engine(config, clients=0)
    from pagoda.server.core_client.replica_client import ReplicaClient
    from pagoda.server.core_client.restarting import RestartingClient

    clients = [RestartingClient(start, restarts) for start in _starts(config)]
    return _with_plugins(config, clients[0] if len(clients) == 1 else ReplicaClient(clients))


def start_shared_engine(config: EngineConfig, *, clients: int) -> ProcessClient | ReplicaClient:
    """Start the engines in processes of their own, for as many SharedClients. Raises as start_engine does."""
    check_first_host(config)
    from pagoda.server.core_client.replica_client import ReplicaClient

    engines = [start() for start in _starts(config, clients)]
    return _with_plugins(config, engines[0] if len(engines) == 1 else ReplicaClient(engines))


def _starts(config: EngineConfig, clients: int = 0) -> list[Callable[[], ProcessClient]]:
    """Return what starts each engine. Raises ConfigError as `engine_processes` does."""
    from pagoda.server.core_client.process_client import ProcessClient

    processes = engine_processes(config)
    return [partial(ProcessClient, process.config, clients=clients, env=process.env) for process in processes]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """How to start one engine."""

    config: EngineConfig
    env: Mapping[str, str] = field(default_factory=dict)  # Variables beside this process's.


def engine_processes(config: EngineConfig) -> list[EngineProcess]:
    """Return how to start the engines of a model: several for replicas that run apart, each with devices of its own.

    Raises ConfigError if the devices or cores cannot be divided so.
    """
    engines = _num_engines(config)
    if engines == 1:
        return [EngineProcess(config)]
    backend = choose_backend(config.model.backend)
    parallel = config.parallel
    runtime = config.runtime
    cores = sorted(os.sched_getaffinity(0)) if backend == "reference" and hasattr(os, "sched_getaffinity") else []
    return [
        EngineProcess(
            replace(
                config,
                runtime=replace(runtime, cpu_omp_threads_bind=runtime.cores_of_engine(engine, engines, cores)),
            ),
            device_env(backend, parallel, engine),
        )
        for engine in range(engines)
    ]


def _num_engines(config: EngineConfig) -> int:
    if config.parallel.data_parallel_size == 1:
        return 1
    return num_engines(choose_backend(config.model.backend), config.parallel)


def check_one_engine(config: EngineConfig) -> None:
    """Raise ConfigError if the replicas of a model run in several engines, which this process alone cannot run."""
    if _num_engines(config) > 1:
        raise ConfigError(
            "--data-parallel-size",
            "each replica needs an engine process of its own; use 1 here, or pagoda serve or AsyncLLM without "
            "--disable-frontend-multiprocessing",
        )


def _with_plugins(config: EngineConfig, client: ClientT) -> ClientT:
    """Run the general plugins and return the client of the engine that starts meanwhile."""
    from pagoda.server.settings.plugins import load_general_plugins

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
    if in_process:
        check_one_engine(config)
    else:
        engine_processes(config)
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
    if config.model.enable_sleep_mode and _num_engines(config) > 1:
        raise ConfigError("--restart-engine", "a replica would restart awake among sleeping ones; drop it")
    if config.parallel.nnodes > 1:
        raise ConfigError("--restart-engine", "the other hosts end with the engine; drop it and restart all hosts")


def check_first_host(config: EngineConfig) -> None:
    """Raise ConfigError on a host that takes no requests."""
    if config.parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            "requests go to host 0; on the others run pagoda serve MODEL --headless with the flags of host 0",
        )
