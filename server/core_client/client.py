"""The API's side of the engine: start it, send it commands, hear from it, notice when it dies.

The protocol and the supervision that its implementations share: process_client (the engine in a process of its own)
and thread_client (in a thread of this one). Knows messages, not requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.ipc_messages import EngineInfo, Failed, FromEngine, Heartbeat, Ready, StepReply, ToEngine

Listener = Callable[[FromEngine], None]
"""Called in the event loop for every message; the last one of a dead engine is Failed."""


class EngineClient(Protocol):
    """One engine. Constructing a client starts it and returns at once."""

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        ...

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Deliver messages to `listener` in `loop` from now on; replaces an earlier listener."""
        ...

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError when the engine is gone."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError when the engine is dead, silent or stuck."""
        ...

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        ...


def start_engine(config: EngineConfig, *, in_process: bool) -> EngineClient:
    """Start an engine for `config`, in a thread of this process or in a process of its own.

    General plugins run in both processes; the engine itself runs them in its own. Raises ConfigError for a broken one,
    and on a host that takes no requests.
    """
    only_first_host(config)
    if in_process:
        from pagoda.server.core_client.thread_client import ThreadClient

        return ThreadClient(config)
    from pagoda.server.core_client.process_client import ProcessClient
    from pagoda.server.plugins import load_general_plugins

    client = ProcessClient(config)
    try:
        load_general_plugins(config)
    except BaseException:
        client.close()
        raise
    return client


def check_start(config: EngineConfig, *, in_process: bool) -> None:
    """Raise ConfigError where `start_engine` would; plugins are left to `check_engine`, which runs them as well."""
    only_first_host(config)
    if not in_process:
        from pagoda.server.core_client.process_client import check_folder

        check_folder(config.runtime)


def only_first_host(config: EngineConfig) -> None:
    """Raise ConfigError on a host that takes no requests."""
    if config.parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            "requests go to host 0; on the others run pagoda serve MODEL --headless with the flags of host 0",
        )


class NoEngine:
    """Implements EngineClient for an application that is only made to see whether it can be."""

    def wait_ready(self) -> EngineInfo:
        """See EngineClient."""
        raise EngineDeadError("no engine was started")

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """See EngineClient."""

    def send(self, command: ToEngine) -> None:
        """See EngineClient."""
        raise EngineDeadError("no engine was started")

    def check(self) -> None:
        """See EngineClient."""
        raise EngineDeadError("no engine was started")

    def close(self, timeout: float = 2.0) -> None:
        """See EngineClient."""


class Supervisor:
    """How an engine died, and whether its steps go on."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._silent_seconds = config.rpc_timeout / 1000
        self._stall_seconds = config.engine_iteration_timeout_s
        self.failed: Failed | None = None
        self.ready = False
        self._heard = self._moved = time.monotonic()
        self._steps, self._busy = 0, False

    def hear(self, message: FromEngine) -> None:
        """Note a sign of life."""
        self._heard = time.monotonic()
        match message:
            case Heartbeat(steps, busy):
                if steps != self._steps or not busy:
                    self._moved = self._heard
                self._steps, self._busy = steps, busy
            case StepReply():
                self._moved = self._heard
            case Ready():
                self.ready, self._moved = True, self._heard
            case Failed():
                self.failed = self.failed or message
            case _:
                pass

    def check(self) -> None:
        """Raise EngineDeadError when there is no life or no progress."""
        if self.failed is not None:
            raise EngineDeadError(self.failed.message)
        now = time.monotonic()
        if now - self._heard > self._silent_seconds:
            raise EngineDeadError(f"the engine has not answered for {now - self._heard:.0f} s")
        if self.ready and self._busy and now - self._moved > self._stall_seconds:
            raise EngineDeadError(f"the engine has been in one step for {now - self._moved:.0f} s")
