"""A line for something that serves one at a time: it serves the API keys that wait in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pagoda.common.engine.messages import GRAMMAR_CHECKS, KEY_SHARE
from pagoda.server.processing.queue_use import OverLimitError


class FairLine:
    """At most `max_waiting` wait, those that are served included. `what`: the plural of what is served, for errors."""

    def __init__(self, max_waiting: int, what: str) -> None:
        self._max_waiting, self._what = max_waiting, what
        self._lines: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()  # next key first
        self._counts: dict[bytes, int] = {}  # waiting and served, by key
        self._busy = False

    def __len__(self) -> int:
        return sum(self._counts.values())

    @asynccontextmanager
    async def turn(self, key: bytes, max_of_key: int) -> AsyncGenerator[None, None]:
        """Wait for the turn of a key's request, which lasts as long as the context. Raise OverLimitError if the line,
        or the part of it that the key may use, is full.
        """
        if len(self) >= self._max_waiting:
            raise OverLimitError(GRAMMAR_CHECKS, f"the server has too many {self._what} in line; try again later")
        if self._counts.get(key, 0) >= max_of_key:
            raise OverLimitError(
                KEY_SHARE, f"this API key has too many {self._what} in line (--max-key-share); try again later"
            )
        self._counts[key] = self._counts.get(key, 0) + 1
        try:
            await self._wait(key)
            try:
                yield
            finally:
                self._next()
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    async def _wait(self, key: bytes) -> None:
        if not self._busy:
            self._busy = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(key, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # cancelled just after its turn came
                self._next()
            raise

    def _next(self) -> None:
        """Give the turn to the next key's first waiter."""
        while self._lines:
            key, line = self._lines.popitem(last=False)
            waiter = line.popleft()
            if line:
                self._lines[key] = line  # behind the other keys
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy = False
