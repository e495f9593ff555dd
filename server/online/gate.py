"""A gate that requests pass on their way to the engine; while it is closed they wait."""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first. Belongs to the event loop in which it is first waited for."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None

    @property
    def closed(self) -> bool:
        """Whether requests wait."""
        return self._open is not None

    def close(self) -> None:
        """Let requests wait."""
        if self._open is None:
            self._open = asyncio.Event()

    def open(self) -> None:
        """Let those that wait go on."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._open is not None:
            await self._open.wait()
