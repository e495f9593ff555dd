"""The generation requests of one AsyncLLM: a stream for each, which has its outputs.

Runs in one event loop. Does not know how commands reach the engine: what the engine is to abort is returned.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import EngineDeadError, RequestError
from pagoda.server.outputs import RequestOutput
from pagoda.server.requests.inputs import PreparedRequest
from pagoda.server.requests.output_processor import OutputProcessor
from pagoda.server.requests.request_stream import RequestStream


class AsyncGeneration:
    """Requests that have not finished."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """All of them."""
        return list(self._streams)

    @property
    def num_sequences(self) -> int:
        """Answers under way, n for a request that asked for n."""
        return self._processor.num_sequences

    def add(self, prepared: PreparedRequest) -> RequestStream:
        """Follow a request. Raises RequestError when its id is in use."""
        self._processor.add(prepared)
        stream = self._streams[prepared.request_id] = RequestStream(prepared.params.output_kind)
        return stream

    def take(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Hand out what a step brought; the engine requests to abort, which a stop string ended."""
        ready, stopped = self._processor.process(outputs)
        for output in ready:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests; their streams close with finish_reason "abort". Returns the engine requests to abort."""
        ids = list(request_ids)
        streams = {each: self._streams.get(each) for each in ids}
        outputs, children = self._end(ids)
        for output in outputs:
            stream = streams[output.request_id]
            if stream is not None:
                stream.put(output)
        return children

    def drop(self, request_id: str) -> list[str]:
        """Forget a request whose stream nobody reads any more. Returns the engine requests to abort."""
        return self._end([request_id])[1]

    def refuse(self, child_id: str, error: RequestError) -> list[str] | None:
        """The engine refused a request: the engine requests to abort; None for one that is not here."""
        request_id = self._processor.parent_of(child_id)
        if request_id is None:
            return None
        stream = self._streams.get(request_id)
        children = self.drop(request_id)
        if stream is not None:
            stream.fail(error)
        return children

    def die(self, error: EngineDeadError) -> None:
        """The engine is dead: fail all."""
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._streams.clear()

    def _end(self, request_ids: list[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests: their last outputs, and the engine requests to abort."""
        ended = self._processor.abort(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        return ended
