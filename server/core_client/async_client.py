"""One engine as an event loop sees it: commands go out, questions get their answers, its death is told once.

Knows an EngineClient and its messages. Does not know requests.
"""

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

Question: TypeAlias = ResetPrefixCache | Sleep | WakeUp
"""A command that the engine answers, under the same ticket."""

Reply: TypeAlias = ResetDone | SleepState


class CoreClientAsync:
    """Commands to one engine, and what it says, in the loop that `attach` was called in last.

    `listener` hears every message but the engine's death; that is told to `on_death`, once, before anybody who waits
    for an answer learns of it.
    """

    def __init__(self, client: EngineClient, listener: Listener, on_death: Callable[[EngineDeadError], None]) -> None:
        self._client = client
        self._listener, self._on_death = listener, on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[Reply]] = {}

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine died; None while it lives."""
        return self._dead

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the cause."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        return self._client.wait_ready()

    def attach(self) -> None:
        """Hear the engine in the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._client.listen(loop, self._hear)

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError when the engine is gone."""
        try:
            self._client.send(command)
        except EngineDeadError as error:
            self.die(error)
            raise

    def tell(self, command: ToEngine) -> None:
        """Queue what a dead engine need not hear."""
        if self._dead is None:
            try:
                self._client.send(command)
            except EngineDeadError as error:
                self.die(error)

    async def ask(self, question: Callable[[int], Question]) -> Reply:
        """Queue the question of a ticket and wait for the answer. Raises EngineDeadError."""
        self.attach()
        self.raise_if_dead()
        ticket = next(self._tickets)
        self.send(question(ticket))
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        return await answer

    def check(self) -> None:
        """Raise EngineDeadError when the engine is dead, silent or stuck in a step."""
        self.raise_if_dead()
        self._client.check()

    def die(self, error: EngineDeadError) -> None:
        """Take the engine for dead, once."""
        if self._dead is not None:
            return
        self._dead = error
        self._on_death(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(error)))
        self._answers.clear()

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        self._client.close(timeout)

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.die(EngineDeadError(message.message))
            return
        self._listener(message)
        if isinstance(message, ResetDone | SleepState):
            answer = self._answers.pop(message.ticket)
            if not answer.done():
                answer.set_result(message)
