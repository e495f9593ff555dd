"""One engine in an event loop: sends commands, matches replies to calls, and reports the engine's death once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeAlias

from pagoda.common.errors import EngineDeadError
from pagoda.server.core_client.client import EngineClient, Listener
from pagoda.server.ipc_messages import (
    EngineInfo,
    Failed,
    FromEngine,
    ResetDone,
    ResetPrefixCache,
    Sleep,
    SleepState,
    ToEngine,
    WakeUp,
)

Command: TypeAlias = ResetPrefixCache | Sleep | WakeUp
"""A command with a reply that has the same ticket."""

Reply: TypeAlias = ResetDone | SleepState


class CoreClientAsync:
    """Commands to one engine and its messages, in the loop that `attach` was last called in.

    `listener` gets every message except Failed. `on_death` is called once, before pending calls fail.
    """

    def __init__(self, client: EngineClient, listener: Listener, on_death: Callable[[EngineDeadError], None]) -> None:
        self._client = client
        self._listener, self._on_death = listener, on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._tickets = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine died; None while it lives."""
        return self._dead

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the cause if the engine is dead."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        return self._client.wait_ready()

    def attach(self) -> None:
        """Receive the engine's messages in the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._client.listen(loop, self._receive)

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError if the engine is dead."""
        try:
            self._client.send(command)
        except EngineDeadError as error:
            self.die(error)
            raise

    def send_if_alive(self, command: ToEngine) -> None:
        """Queue a command that a dead engine need not get."""
        if self._dead is None:
            try:
                self._client.send(command)
            except EngineDeadError as error:
                self.die(error)

    async def call(self, command: Callable[[int], Command]) -> Reply:
        """Queue the command made with a new ticket and wait for its reply. Raises EngineDeadError."""
        self.attach()
        self.raise_if_dead()
        ticket = next(self._tickets)
        self.send(command(ticket))
        reply = self._replies[ticket] = asyncio.get_running_loop().create_future()
        return await reply

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead, silent or stuck in a step."""
        self.raise_if_dead()
        self._client.check()

    def die(self, error: EngineDeadError) -> None:
        """Mark the engine dead, once, and fail pending calls."""
        if self._dead is not None:
            return
        self._dead = error
        self._on_death(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(str(error)))
        self._replies.clear()

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        self._client.close(timeout)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.die(EngineDeadError(message.message))
            return
        self._listener(message)
        if isinstance(message, ResetDone | SleepState):
            reply = self._replies.pop(message.ticket)
            if not reply.done():
                reply.set_result(message)
