"""From the engine's vectors to what callers read. The pooling model's counterpart of output_processor.

Runs once per request, in the API process. Knows no socket and no event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import RequestError
from pagoda.server.requests.pooling_inputs import PreparedPooling
from pagoda.server.requests.pooling_outputs import PoolingOutput, PoolingRequestOutput

BaseOutput = PoolingRequestOutput[PoolingOutput]


class PoolingProcessor:
    """The pooling requests of one engine that have not finished."""

    def __init__(self) -> None:
        self._requests: dict[str, PreparedPooling] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prepared: PreparedPooling) -> None:
        """Follow a request. Raises RequestError when its id is in use."""
        if prepared.request_id in self._requests:
            raise RequestError("request_id", f"request_id {prepared.request_id!r} is in use")
        self._requests[prepared.request_id] = prepared

    def process(self, outputs: Iterable[EngineOutput]) -> list[BaseOutput]:
        """What callers read after a step. Outputs of requests that are gone are dropped."""
        ready: list[BaseOutput] = []
        for output in outputs:
            if output.pooled is not None and (request := self._requests.pop(output.request_id, None)) is not None:
                numbers = PoolingOutput(output.pooled.array)
                ids, cached = request.prompt.token_ids, output.num_cached_tokens
                ready.append(
                    PoolingRequestOutput(request.request_id, numbers, ids, cached, scheduled_ts=output.scheduled)
                )
        return ready

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; those of them that were known."""
        return [each for each in request_ids if self._requests.pop(each, None) is not None]

    @property
    def request_ids(self) -> list[str]:
        """All unfinished requests."""
        return list(self._requests)
