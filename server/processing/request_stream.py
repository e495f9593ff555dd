"""The outputs of one request on their way to whoever reads them, who may be slower than the engine.

Knows outputs and one event loop. Does not know the engine.
"""

from __future__ import annotations

import asyncio

from pagoda.common.sampling_params import RequestOutputKind
from pagoda.server.outputs import RequestOutput


class RequestStream:
    """One request's outputs. A consumer that falls behind reads them merged into one."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._joins = kind is RequestOutputKind.DELTA
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for news

    def put(self, output: RequestOutput) -> None:
        """Take an output in."""
        if self._pending is None:
            self._pending = output
        else:
            self._pending.add(output, aggregate=self._joins)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what is pending."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output. Raises what the request failed with."""
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
