"""Several API server processes over one engine: each asks the others for what it reports of the whole server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

import msgspec

from pagoda.common.observe.aggregate import FamilySnapshot

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 1.0
"""How long a process has for its report; of a later one its last report counts."""

_LOAD = b"l"
_ALL = b"a"


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one API server process knows of itself."""

    running: int = 0  # Number of requests in the engine.
    prompted: float = 0.0  # Number of prompt tokens since the start.
    generated: float = 0.0  # Number of generated tokens since the start.
    metrics: list[FamilySnapshot] = []


class ApiPeers:
    """The `count` API server processes of a server, of which this one has number `index`. Their sockets are at
    `address`, with mode 0600. `report`: returns this process's report, with metrics if the argument is true.
    """

    def __init__(self, address: str, index: int, count: int, report: Callable[[bool], PeerReport]) -> None:
        self._address = address
        self.index = index
        self._count = count
        self._report = report
        self._last: dict[tuple[int, bool], PeerReport] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer the other processes from now on."""
        path = self._path(self.index)
        self._server = await asyncio.start_unix_server(self._answer, path)
        os.chmod(path, 0o600)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    async def reports(self, *, metrics: bool) -> list[PeerReport]:
        """Return the reports of all processes, in order. One that has never answered is left out."""
        others = [index for index in range(self._count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, metrics) for index in others))
        reports = dict(zip(others, answers)) | {self.index: self._report(metrics)}
        return [report for _, report in sorted(reports.items()) if report is not None]

    async def _ask(self, index: int, metrics: bool) -> PeerReport | None:
        """Return the report of another process, or the last one that it gave."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(_ALL if metrics else _LOAD)
                    data = await reader.read(-1)
                finally:
                    writer.close()
            self._last[index, metrics] = msgspec.msgpack.decode(data, type=PeerReport)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            logger.debug("API server process %d does not answer: %s", index, error)
        return self._last.get((index, metrics))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = await reader.read(1)
            writer.write(msgspec.msgpack.encode(self._report(question == _ALL)))
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def _path(self, index: int) -> str:
        return f"{self._address}.api{index}".removeprefix("ipc://")
