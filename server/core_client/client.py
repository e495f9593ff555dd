"""The API process's side of an engine: the client protocol and the supervision that both implementations share.

Implementations: process_client (the engine in its own process) and thread_client (in a thread of this one).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.errors import EngineDeadError
from pagoda.server.ipc_messages import EngineInfo, Failed, FromEngine, Heartbeat, Ready, StepReply, ToEngine

Listener = Callable[[FromEngine], None]
"""Called in the event loop for every message; the last message of a dead engine is Failed."""


class EngineClient(Protocol):
    """One engine. Constructing a client starts it and returns at once."""

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        ...

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Deliver messages to `listener` in `loop` from now on; replaces an earlier listener."""
        ...

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError if the engine is dead."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead, silent or stuck."""
        ...

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        ...


class NoEngine:
    """Implements EngineClient without an engine, for an application that is only built to be checked."""

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
    """Tracks from an engine's messages whether it failed, is silent, or is stuck in a step."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._silence_timeout = config.rpc_timeout / 1000
        self._step_timeout = config.engine_iteration_timeout_s
        self.failed: Failed | None = None
        self.ready = False
        self._last_message = self._last_progress = time.monotonic()
        self._steps, self._busy = 0, False

    def note(self, message: FromEngine) -> None:
        """Record a message from the engine."""
        self._last_message = time.monotonic()
        match message:
            case Heartbeat(steps, busy):
                if steps != self._steps or not busy:
                    self._last_progress = self._last_message
                self._steps, self._busy = steps, busy
            case StepReply():
                self._last_progress = self._last_message
            case Ready():
                self.ready, self._last_progress = True, self._last_message
            case Failed():
                self.failed = self.failed or message
            case _:
                pass

    def check(self) -> None:
        """Raise EngineDeadError if the engine failed, is silent, or makes no progress."""
        if self.failed is not None:
            raise EngineDeadError(self.failed.message)
        now = time.monotonic()
        if now - self._last_message > self._silence_timeout:
            raise EngineDeadError(f"the engine has not answered for {now - self._last_message:.0f} s")
        if self.ready and self._busy and now - self._last_progress > self._step_timeout:
            raise EngineDeadError(f"the engine has been in one step for {now - self._last_progress:.0f} s")
