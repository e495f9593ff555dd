"""The pooling requests of one AsyncLLM: a future for each, which has its one answer.

Runs in one event loop. Does not know how commands reach the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import RequestError
from pagoda.server.requests.pooling_inputs import PreparedPooling
from pagoda.server.requests.pooling_outputs import PoolingOutput, PoolingRequestOutput
from pagoda.server.requests.pooling_processor import PoolingProcessor

PoolingAnswer: TypeAlias = "asyncio.Future[PoolingRequestOutput[PoolingOutput]]"


class AsyncPooling:
    """Requests that have not finished."""

    def __init__(self) -> None:
        self._processor = PoolingProcessor()
        self._answers: dict[str, PoolingAnswer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def request_ids(self) -> list[str]:
        """All of them."""
        return list(self._answers)

    def add(self, prepared: PreparedPooling) -> PoolingAnswer:
        """Follow a request. Raises RequestError when its id is in use."""
        self._processor.add(prepared)
        answer = self._answers[prepared.request_id] = asyncio.get_running_loop().create_future()
        return answer

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Hand out what a step brought."""
        for output in self._processor.process(outputs):
            answer = self._answers.pop(output.request_id)
            if not answer.done():
                answer.set_result(output)

    def fail(self, request_ids: Iterable[str], error: Exception | None = None) -> list[str]:
        """End requests with an error, or without anybody hearing of it; those of them that were known."""
        known = self._processor.drop(request_ids)
        for request_id in known:
            answer = self._answers.pop(request_id)
            if error is None:
                answer.cancel()
            elif not answer.done():
                answer.set_exception(error)
                answer.exception()  # it is nobody's fault when nobody waits for it any more
        return known

    def refuse(self, request_id: str, error: RequestError) -> bool:
        """The engine refused a request; False for one that is not here."""
        return bool(self.fail([request_id], error))
