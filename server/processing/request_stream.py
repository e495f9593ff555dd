"""The outputs of one request on their way to a reader, which may be slower than the engine."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from pagoda.common.sampling_params import RequestOutputKind
from pagoda.server.outputs import RawPoolingOutput, RequestOutput

OutputT = TypeVar("OutputT", RequestOutput, RawPoolingOutput)


class RequestStream(Generic[OutputT]):
    """One request's outputs. A reader that falls behind gets them merged into one."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._aggregates = kind is RequestOutputKind.DELTA
        self._pending: OutputT | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for the next output

    def put(self, output: OutputT) -> None:
        """Add an output."""
        if isinstance(self._pending, RequestOutput) and isinstance(output, RequestOutput):
            self._pending.add(output, aggregate=self._aggregates)
        else:
            self._pending = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the pending output."""
        self._error = error
        self._wake()

    def take_pending(self) -> OutputT | None:
        """Return the output that has not been read, if any, without waiting."""
        output, self._pending = self._pending, None
        return output

    async def get(self) -> OutputT:
        """Wait for the next output. Raises what the request failed with."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output, self._pending = self._pending, None
        return output

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
