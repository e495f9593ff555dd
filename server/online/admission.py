"""Whether another request may come in: engine awake and alive, not too much to do already."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.common.config.scheduler import SchedulerConfig
from pagoda.common.errors import QueueFullError, RequestError
from pagoda.server.link.engine_link import EngineLink
from pagoda.server.online.async_sleep import AsyncSleep


class Admission:
    """The door of one AsyncLLM. `count`: answers under way, running or waiting."""

    def __init__(
        self, config: SchedulerConfig, engine: EngineLink, sleep: AsyncSleep, count: Callable[[], int]
    ) -> None:
        self._config, self._engine, self._sleep, self._count = config, engine, sleep, count

    def check(self, answers: int) -> None:
        """Raise EngineDeadError, SleepError, QueueFullError, or RequestError for more answers than may ever run."""
        self._engine.raise_if_dead()
        self._sleep.raise_if_asleep()
        most = self._config.max_num_queued_reqs
        if most is None:
            return
        if answers > most:
            raise RequestError(
                "n", f"n {answers} is above the {most} answers that may be under way (--max-num-queued-reqs)"
            )
        under_way = self._count()
        if under_way + answers > most:
            raise QueueFullError(f"the server has {under_way} of {most} answers under way; try again")

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that nothing heeds."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")
