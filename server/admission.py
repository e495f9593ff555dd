"""Whether AsyncLLM takes a request now: limit of the queue, paused generation, memory that is asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.core import ASLEEP, SLEEP_TAGS, check_sleep, check_wake_up
from pagoda.common.errors import QueueFullError, RequestError, SleepError
from pagoda.common.observe.request_events import QUEUED_REQUESTS
from pagoda.server.core_client.client import Command, CoreClientAsync
from pagoda.server.ipc_messages import Sleep, SleepState, WakeUp


class Admission:
    """Decides whether a request is accepted. `count_sequences`: unfinished sequences, running and queued. `on_rejected`
    is called with the limit that a request exceeds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        engine: CoreClientAsync,
        sleep: AsyncSleep,
        count_sequences: Callable[[], int],
        on_rejected: Callable[[str], None],
    ) -> None:
        self._config, self._engine, self._sleep, self._count_sequences = config, engine, sleep, count_sequences
        self._on_rejected = on_rejected

    def check(self, sequences: int) -> None:
        """Raise EngineDeadError, SleepError, QueueFullError, or RequestError if the queue can never hold them."""
        self._engine.raise_if_dead()
        self._sleep.raise_if_asleep()
        limit = self._config.max_num_queued_reqs
        if limit is None:
            return
        if sequences > limit:
            raise RequestError("n", f"n {sequences} is above the limit of {limit} sequences (--max-num-queued-reqs)")
        unfinished = self._count_sequences()
        if unfinished + sequences > limit:
            self._on_rejected(QUEUED_REQUESTS)
            raise QueueFullError(f"the server has {unfinished} of {limit} sequences in progress; try again")

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that the scheduling policy ignores."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")


class Gate:
    """Requests wait while it is closed. Open at first; belongs to the event loop in which it is first awaited."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None

    @property
    def closed(self) -> bool:
        """True while requests wait."""
        return self._open is not None

    def close(self) -> None:
        """Make requests wait."""
        if self._open is None:
            self._open = asyncio.Event()

    def open(self) -> None:
        """Let waiting requests continue."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._open is not None:
            await self._open.wait()


class AsyncSleep:
    """The API process's view of which parts of the engine's memory are offloaded."""

    def __init__(self, config: ModelConfig, engine: CoreClientAsync) -> None:
        self._config, self._engine = config, engine
        self._asleep: tuple[str, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """True while a part is offloaded or about to be."""
        return bool(self._asleep)

    def raise_if_asleep(self) -> None:
        """Raise SleepError while a part is offloaded."""
        if self._asleep:
            raise SleepError(ASLEEP)

    def begin(self, level: int, mode: str) -> None:
        """Count the engine as asleep from now on; `sleep` must follow.

        Raises RequestError for an unknown level or mode, ConfigError for an engine that cannot sleep.
        """
        check_sleep(self._config, level, mode)
        self._asleep = SLEEP_TAGS

    async def sleep(self, level: int) -> None:
        """Free the memory once no request runs. Raises SleepError, EngineDeadError."""
        await self._change(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Restore the named parts, or all. Raises RequestError, ConfigError, SleepError, EngineDeadError."""
        checked = check_wake_up(self._config, tags)
        await self._change(lambda ticket: WakeUp(ticket, checked))

    def update(self, state: SleepState) -> None:
        """Take over the engine's state."""
        self._asleep = state.asleep

    async def _change(self, command: Callable[[int], Command]) -> None:
        reply = await self._engine.call(command)
        if isinstance(reply, SleepState) and reply.error:
            raise SleepError(reply.error)
