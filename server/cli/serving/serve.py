"""`pagoda serve`: bind the port, start the engine, and serve HTTP from then on until all requests are finished.

The engine starts in its own process before the HTTP stack is imported, so that loading the model and importing overlap.
Until the engine is warm, /health and /ready answer 503. With --headless there is no HTTP: the engine follows host 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pagoda.common.config.defaults import ResolvedRow
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.env import ALLOW_RUNTIME_LORA_UPDATING
from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS, ResolvedSettings, build
from pagoda.common.config.tpu_host import tpu_chips, watch_maintenance
from pagoda.common.errors import ConfigError
from pagoda.common.observe.logs import configure
from pagoda.common.weights.hub import named_path
from pagoda.server.cli.serving import api_servers
from pagoda.server.cli.serving.api_servers import WatchSignals
from pagoda.server.cli.serving.signals import (
    Stopped,
    deferring_signals,
    ignore_signals,
    on_signals,
    stopping_on_signals,
)
from pagoda.server.core_client import check_start, engine_processes, start_engine
from pagoda.server.core_client.client import NoEngine
from pagoda.server.core_client.memory import trim_memory
from pagoda.server.core_client.process_client import ProcessClient, check_folder
from pagoda.server.parsers.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS, check_formats
from pagoda.server.settings.flags import AsyncEngineArgs, resolve_settings
from pagoda.server.settings.resolve import check_machine

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pagoda.server.async_llm import AsyncLLM
    from pagoda.server.http.server import HttpServer
    from pagoda.server.http.state import ServerState
    from pagoda.server.settings.resolve import Resolved


VALUES: Final = {
    "tool_call_parser": (AUTO, NONE, *TOOL_FORMATS),
    "reasoning_parser": (AUTO, NONE, *REASONING_FORMATS),
}
"""Settings whose values the help lists beside those that have choices."""

BACKLOG: Final = 2048

_GC_THRESHOLD: Final = 50_000  # Allocations per young collection; a step makes thousands, nearly all freed by refcount.

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or an engine failure. Raises the error that prevents the start.

    Returns 0 after a signal if all requests could finish, 1 if some were cut or the engine failed.
    """
    start_time = time.monotonic()
    try:
        with stopping_on_signals():
            _, engine_config, config = _prepared(args)
            if config.headless:
                return run_headless(engine_config)
            with _listening(config) as listener:
                _watch_host(config)
                if config.api_server_count > 1:
                    return _run_servers(engine_config, config, listener, start_time)
                return _run_server(engine_config, config, listener, start_time)
    except Stopped:
        logger.info("stopped before the server was ready")
        return 0


def _watch_host(config: ServerConfig) -> None:
    """Watch for maintenance events of a TPU host, in a thread."""
    if config.drain_on_maintenance and tpu_chips():
        threading.Thread(target=watch_maintenance, args=(_stop,), name="maintenance", daemon=True).start()


def _stop(event: str) -> None:
    """Stop the server as SIGTERM does."""
    logger.warning("%s: the server stops (--no-drain-on-maintenance: it does not)", event)
    os.kill(os.getpid(), signal.SIGTERM)


def _run_server(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, start_time: float) -> int:
    with contextlib.ExitStack() as owned:
        with deferring_signals():
            client = start_engine(engine_config, in_process=config.disable_frontend_multiprocessing)
            owned.callback(client.close)
            owned.callback(ignore_signals)  # Another signal would leave the engine, its folder or the socket behind.
        from pagoda.server.async_llm import AsyncLLM

        llm = AsyncLLM(engine_config, wait=False, client=client)
        return _serve(llm, config, listener, start_time)


def _run_servers(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, start_time: float) -> int:
    logger.info("listening on %s, loading %s", _address(listener, config), engine_config.model.model)
    return api_servers.run_api_servers(engine_config, config, listener, on_signals, start_time)


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    """Return the settings and the resolved engine. Raises every error that `run` raises before it reads weights."""
    from pagoda.server.async_llm import AsyncLLM
    from pagoda.server.startup.engine import check_engine

    settings, engine_config, config = _prepared(args)
    given_template = None
    if config.headless:
        check_folder(engine_config.runtime)
    else:
        bind(config).close()
        _remove_socket(config)
        check_start(engine_config, in_process=config.disable_frontend_multiprocessing)
        _, state = application(AsyncLLM(engine_config, wait=False, client=NoEngine()), config)
        given_template = state.given_template
    resolved = check_engine(engine_processes(engine_config)[0].config, "server", settings.sources)
    return settings, replace(resolved, derived=(*resolved.derived, *_format_rows(resolved, config, given_template)))


def _format_rows(resolved: Resolved, config: ServerConfig, given_template: str | None) -> tuple[ResolvedRow, ...]:
    """Return the rows of the formats that are found from the chat template."""
    from pagoda.common.models.family import AnswerFormat
    from pagoda.server.parsers.answer_formats import answer_formats
    from pagoda.server.processing.workers.worker import TemplateRenderer
    from pagoda.server.settings.tokenizer import open_tokenizer

    if config.headless or resolved.pooling is not None:
        return ()
    hints = AnswerFormat() if resolved.family is None else resolved.family.answers
    tokenizer = open_tokenizer(resolved.config)
    with contextlib.closing(TemplateRenderer()) as renderer:
        render = partial(renderer.render, lane="short")
        return answer_formats(config, resolved.config, given_template, hints, tokenizer, render).rows


def _prepared(args: argparse.Namespace) -> tuple[ResolvedSettings, EngineConfig, ServerConfig]:
    """Return the settings and their configurations, after configuring the logs. Raises ConfigError."""
    settings = resolve_settings(args, ENGINE_SETTINGS, SERVER_SETTINGS)
    configure(build(LoggingConfig, settings.values), also=("uvicorn",))
    engine_config, config = _configured(settings)
    named_path(engine_config.model.model)
    check_machine(engine_config)  # This precedes the download of a model that this machine cannot run.
    return settings, engine_config, config


def configurations(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of the command line, file and environment. Raises ConfigError."""
    return _configured(resolve_settings(args, ENGINE_SETTINGS, SERVER_SETTINGS))


def _configured(settings: ResolvedSettings) -> tuple[EngineConfig, ServerConfig]:
    """Return both configurations. Raises ConfigError."""
    server = build(ServerConfig, settings.values)
    if server.enable_log_outputs and not settings.values["enable_log_requests"]:
        raise ConfigError("--enable-log-outputs", "needs --enable-log-requests")
    engine = AsyncEngineArgs.from_resolved(settings).create_engine_config()
    check_headless(engine.parallel, server.headless)
    check_processes(engine, server)
    check_formats(engine, server)
    return engine, server


def check_processes(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError for features that change the state of one API server process only, where there are several."""
    if server.api_server_count == 1:
        return
    if engine.model.enable_sleep_mode:
        raise ConfigError(
            "--api-server-count",
            "requests of one process cannot be stopped by another; drop it, or --enable-sleep-mode",
        )
    for flag, is_set in (
        ("--restart-engine", engine.runtime.restart_engine),
        ("--exit-on-stuck-engine", engine.runtime.exit_on_stuck_engine),
    ):
        if is_set:
            raise ConfigError(flag, "needs one API server process; drop it or --api-server-count")
    if ALLOW_RUNTIME_LORA_UPDATING.read():
        raise ConfigError(
            "--api-server-count",
            f"adapters are loaded by one process; unset {ALLOW_RUNTIME_LORA_UPDATING.name}, or use 1",
        )


# Headless: a host other than host 0.


def check_headless(parallel: ParallelConfig, headless: bool) -> None:
    """Raise ConfigError unless --headless is given on every host but host 0, which serves HTTP."""
    rank = parallel.node_rank
    last = parallel.nnodes - 1
    if last and rank > last:
        raise ConfigError("--node-rank", f"{rank} is out of range for {last + 1} hosts; use 0 to {last}")
    if headless and not last:
        raise ConfigError("--headless", "there is no host 0 to follow; set --nnodes and --node-rank, or drop it")
    if headless and not rank:
        raise ConfigError("--headless", "host 0 serves the requests; drop it, or set another --node-rank on this host")
    if rank and not headless:
        raise ConfigError("--node-rank", "only host 0 serves HTTP; add --headless and --nnodes on the other hosts")


def run_headless(config: EngineConfig) -> int:
    """Follow host 0 until it ends or a signal arrives; returns 0. Raises the error of this host or of host 0."""
    try:
        with stopping_on_signals(), contextlib.ExitStack() as owned:
            with deferring_signals():
                client = ProcessClient(config)
                owned.callback(client.close, timeout=0)
                owned.callback(ignore_signals)
            info = client.wait_ready()
            logger.info("%s on %s (%s): %s", info.backend, info.device, info.dtype, info.memory)
            logger.info("ready to follow host 0")
            client.wait_end()
            logger.info("host 0 has ended")
    except Stopped:
        logger.info("stopping")
    return 0


# The listening socket.


@contextlib.contextmanager
def _listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket, closed at the end; a unix socket is removed from its folder. Raises ConfigError."""
    with contextlib.ExitStack() as owned:
        with deferring_signals():
            listener = bind(config)
            owned.callback(_remove_socket, config)
            owned.callback(listener.close)
        if is_open(config):
            logger.warning("anybody who reaches %s may send requests: set --api-key", _address(listener, config))
        yield listener


def bind(config: ServerConfig) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address is in use or invalid."""
    if config.uds is not None:
        return bind_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.address or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("--host", f"{config.address}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--port" if error.errno in (98, 48, 13) else "--host"
        raise ConfigError(
            flag, f"cannot listen on {config.address}:{config.port}: {error.strerror}; choose another {flag}"
        ) from None
    return listener


def is_open(config: ServerConfig) -> bool:
    """Return True if other machines may send requests without a key."""
    return not config.api_key and config.uds is None and config.address not in ("127.0.0.1", "localhost", "::1")


def bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o177)  # The mode is 0600 from the first moment.
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("--uds", f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that has ended."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def _remove_socket(config: ServerConfig) -> None:
    if config.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)


# The server.


def application(
    llm: AsyncLLM,
    config: ServerConfig,
    *,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    at_once: int | None = None,
) -> tuple[HttpServer, ServerState]:
    """Return the HTTP server and the state that its routes share. Raises ConfigError.

    `wrap`: returns an application around the server's; `at_once`: see HttpServer.
    """
    from pagoda.common.observe.metrics import Metrics
    from pagoda.server.api.app import create_app
    from pagoda.server.http.server import http_server
    from pagoda.server.http.state import ServerState

    metrics = llm.metrics = Metrics(llm.names[0], llm.config.parallel.data_parallel_size, llm.config.lora.slots)
    state = ServerState(llm, config, metrics)
    app = create_app(state)
    server = (
        http_server(app, config, wrap=wrap) if at_once is None else http_server(app, config, wrap=wrap, at_once=at_once)
    )
    return server, state


def _serve(llm: AsyncLLM, config: ServerConfig, listener: socket.socket, start_time: float) -> int:
    from pagoda.server.http.connections import raise_descriptor_limit

    raise_descriptor_limit(config.max_connections)
    server, state = application(llm, config)
    logger.info("listening on %s, loading %s", _address(listener, config), state.engine.config.model.model)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(until_stopped(server, state, [listener], on_signals, lambda: _log_ready(state, start_time)))


async def until_stopped(
    server: HttpServer,
    state: ServerState,
    listeners: list[socket.socket],
    watch_signals: WatchSignals,
    on_ready: Callable[[], None],
) -> int:
    """Run the HTTP server and watch the engine. Returns 0 after a signal if no request was cut, else 1."""
    stop = asyncio.Event()
    hurry = asyncio.Event()
    with watch_signals(stop, hurry):
        return await _until_stopped(server, state, listeners, stop, hurry, on_ready)


async def _until_stopped(
    server: HttpServer,
    state: ServerState,
    listeners: list[socket.socket],
    stop: asyncio.Event,
    hurry: asyncio.Event,
    on_ready: Callable[[], None],
) -> int:
    http = asyncio.ensure_future(server.serve(sockets=listeners))
    stopped = asyncio.ensure_future(stop.wait())
    engine_watch = asyncio.ensure_future(_watch_engine(state, on_ready))
    try:
        await asyncio.wait({http, stopped, engine_watch}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            logger.info("stopping; %d requests are in progress", server.num_requests)
            await _first_of(state.drain(lambda: server.num_requests, hurry), http)
        server.should_exit = True
        await http
        if engine_watch.done() and (error := engine_watch.exception()) is not None:
            raise error
        return 0 if stopped.done() and not _num_cut(server, state) else 1
    finally:
        for task in (engine_watch, stopped):
            task.cancel()
        await asyncio.gather(engine_watch, stopped, return_exceptions=True)
        state.engine.shutdown()


def _num_cut(server: HttpServer, state: ServerState) -> int:
    """Return the number of requests that the stop ended, after logging it."""
    cut = state.stopping.num_called + server.num_cut
    if cut:
        logger.warning(
            "%d requests were cut when the server stopped; a longer --shutdown-timeout (now %g s) lets them finish",
            *(cut, state.config.shutdown_timeout),
        )
    return cut


async def _watch_engine(state: ServerState, on_ready: Callable[[], None]) -> None:
    """Wait for the engine to be ready, call `on_ready`, then wait for its failure, and raise it."""
    await state.wait_until_ready()
    gc.collect()
    gc.freeze()  # Later collections skip everything allocated so far.
    gc.set_threshold(_GC_THRESHOLD)
    on_ready()
    disabled = state.engine.config.observability.disable_log_stats or (state.peers is not None and state.peers.index)
    statistics = None if disabled else asyncio.ensure_future(state.log_stats())
    trimming = asyncio.ensure_future(trim_memory())
    try:
        failure = await state.until_dead()
        if not state.config.keep_alive_on_engine_death:
            raise failure
        logger.error("the engine died: %s; the server stays up (--keep-alive-on-engine-death)", failure)
        await asyncio.Event().wait()
    finally:
        trimming.cancel()
        if statistics is not None:
            statistics.cancel()


def _log_ready(state: ServerState, start_time: float) -> None:
    info = state.engine.info
    logger.info("%s on %s (%s): %s", info.backend, info.device, info.dtype, info.memory)
    logger.info("ready after %.1f s: %s", time.monotonic() - start_time, _phases(info.phases))


async def _first_of(coroutine: Coroutine[Any, Any, None], other: asyncio.Future[None]) -> None:
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _phases(phases: tuple[tuple[str, float], ...]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)


def _address(listener: socket.socket, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile is not None else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
