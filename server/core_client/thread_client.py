"""An engine in a thread of this process: one process to debug, no isolation."""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import EngineDeadError
from pagoda.server.core_client.client import Listener, Supervisor
from pagoda.server.core_client.engine_loop import Progress, run_engine
from pagoda.server.ipc_messages import (
    EngineInfo,
    Failed,
    FromEngine,
    Heartbeat,
    Ready,
    Shutdown,
    ToEngine,
    failure,
)

if TYPE_CHECKING:
    from pagoda.server.startup.worker_group import BuiltEngine


class ThreadClient:
    """Implements client.EngineClient. `build` builds the engine; default: build_engine."""

    def __init__(self, config: EngineConfig, build: Callable[[EngineConfig], BuiltEngine] | None = None) -> None:
        self._config = config
        self._build = build
        self._supervisor = Supervisor(config.runtime)
        self._progress = Progress()
        self._commands: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[EngineInfo | BaseException] = queue.SimpleQueue()
        self._listener_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._thread.start()

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        result = self._started.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Deliver messages to `listener` in `loop` from now on; replaces an earlier listener."""
        with self._listener_lock:
            self._loop, self._listener = loop, listener
            if self._supervisor.failed is not None:
                loop.call_soon_threadsafe(listener, self._supervisor.failed)

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError if the engine is dead."""
        if self._supervisor.failed is not None:
            raise EngineDeadError(self._supervisor.failed.message)
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        self._commands.put(command)

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead or stuck."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if self._supervisor.failed is None:
            self._supervisor.note(Heartbeat(self._progress.steps, self._progress.busy))
        self._supervisor.check()

    def close(self, timeout: float = 2.0) -> None:
        """End the engine after its current step. Idempotent."""
        if not self._closed:
            self._closed = True
            self._commands.put(Shutdown())
            self._thread.join(timeout)

    def receive(self, wait: bool) -> list[ToEngine]:
        """Implement engine_loop.Inbox."""
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def _run(self) -> None:
        try:
            built = self._build_engine()
        except BaseException as error:
            self._deliver(failure(error))
            self._started.put(error)
            return
        if built.hosts is not None:
            built.hosts.watch(lambda death: self._deliver(failure(death)))
        self._deliver(Ready(built.info))
        self._started.put(built.info)
        try:
            run_engine(built.core, self, self._deliver, self._progress, built.sleeper)
        except BaseException as error:
            traceback.print_exc()
            self._deliver(failure(error))
        else:
            self._deliver(Failed("EngineDeadError", "the engine was shut down"))
        finally:
            built.backend.close()

    def _build_engine(self) -> BuiltEngine:
        if self._build is not None:
            return self._build(self._config)
        from pagoda.server.startup.engine import build_engine

        return build_engine(self._config, "server")

    def _deliver(self, message: FromEngine) -> None:
        with self._listener_lock:
            self._supervisor.note(message)
            if self._loop is not None and self._listener is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._listener, message)
