"""Threads in which long texts are tokenised: a bounded number of characters at a time, ended with their request."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar

from pagoda.common.engine.messages import TEXT_LENGTH
from pagoda.common.text.tokenizer import CANCELLED
from pagoda.server.processing.queue_use import OverLimitError

MAX_CHARACTERS: Final = 1 << 22
"""Characters in the threads at a time, of more than one request; tokenising takes up to 80 bytes for each."""

MAX_WAITING: Final = 1 << 26
"""Characters of requests that wait for the threads; further ones get HTTP 429."""

_THREADS: Final = 4

T = TypeVar("T")


class TextThreads:
    """Runs work on texts in threads, in one event loop. `on_rejected` is called with the reason of a refusal."""

    def __init__(self, on_rejected: Callable[[str], None]) -> None:
        self._on_rejected = on_rejected
        self._pool = ThreadPoolExecutor(_THREADS, "pagoda-text")
        self._running = self._waiting = 0  # characters
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, characters: int, work: Callable[..., T], *arguments: object) -> T:
        """Return what `work` returns. If the caller is cancelled, its tokenising ends after the next chunk of text.

        `characters`: the length of its texts. Raises OverLimitError if too much waits, and what `work` raises.
        """
        await self._admit(characters)
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()
        context = copy_context()
        context.run(CANCELLED.set, cancelled)
        try:
            future: Future[T] = self._pool.submit(partial(context.run, work, *arguments))
        except RuntimeError:  # closed
            self._leave(characters)
            raise
        # The thread may go on for a moment after the caller was cancelled: its characters count until it ends.
        future.add_done_callback(lambda _: _call_in(loop, partial(self._leave, characters)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self) -> None:
        """End the threads after what they do now. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _admit(self, characters: int) -> None:
        if not self._line and self._has_room(characters):
            self._running += characters
            return
        if self._waiting + characters > MAX_WAITING:
            self._on_rejected(TEXT_LENGTH)
            raise OverLimitError(TEXT_LENGTH, "the server has too many long texts to tokenise; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((characters, turn))
        self._waiting += characters
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled just after its turn came
                self._leave(characters)
            raise

    def _has_room(self, characters: int) -> bool:
        return not self._running or self._running + characters <= MAX_CHARACTERS

    def _leave(self, characters: int) -> None:
        self._running -= characters
        while self._line and (self._line[0][1].done() or self._has_room(self._line[0][0])):
            size, turn = self._line.popleft()
            self._waiting -= size
            if not turn.done():
                self._running += size
                turn.set_result(None)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call in the loop, unless it is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
