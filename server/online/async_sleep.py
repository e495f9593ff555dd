"""The sleep of the engine behind one AsyncLLM, as the API's side knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagoda.common.config.model import ModelConfig
from pagoda.common.engine.sleep import ASLEEP, TAGS
from pagoda.common.errors import SleepError
from pagoda.server.link.engine_link import EngineLink, Question
from pagoda.server.link.sleeping import check_sleep, check_wake_up
from pagoda.server.wire import Sleep, SleepState, WakeUp


class AsyncSleep:
    """Which parts of the engine's memory are away."""

    def __init__(self, config: ModelConfig, engine: EngineLink) -> None:
        self._config, self._engine = config, engine
        self._asleep: tuple[str, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """True while a part is away, or on its way there."""
        return bool(self._asleep)

    def raise_if_asleep(self) -> None:
        """Raise SleepError while a part is away."""
        if self._asleep:
            raise SleepError(ASLEEP)

    def begin(self, level: int, mode: str) -> None:
        """From here on the engine counts as asleep; `sleep` must follow.

        Raises RequestError for a level or mode that there is not, ConfigError for an engine that cannot sleep.
        """
        check_sleep(self._config, level, mode)
        self._asleep = TAGS

    async def sleep(self, level: int) -> None:
        """Give the memory back once nothing runs. Raises SleepError, EngineDeadError."""
        await self._change(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Have the named parts again, or all. Raises RequestError, ConfigError, SleepError, EngineDeadError."""
        named = check_wake_up(self._config, tags)
        await self._change(lambda ticket: WakeUp(ticket, named))

    def hear(self, state: SleepState) -> None:
        """Take in what the engine says."""
        self._asleep = state.asleep

    async def _change(self, question: Callable[[int], Question]) -> None:
        answer = await self._engine.ask(question)
        if isinstance(answer, SleepState) and answer.error:
            raise SleepError(answer.error)
