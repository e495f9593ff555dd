"""Lines in which work waits its turn: long texts for the threads that tokenise them, and what owners take turns at.

TextThreads takes a bounded number of characters at a time, and ends with its request; FairLine serves one API key after
the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar

from pagoda.common.engine.messages import GRAMMAR_CHECKS, KEY_SHARE, TEXT_LENGTH
from pagoda.common.text.tokenizer import CANCELLED
from pagoda.server.core_client.client import OverLimitError

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
        self._running = self._waiting = 0  # Numbers of characters.
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
        except RuntimeError:  # The loop is closed.
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
            if turn.done() and not turn.cancelled():  # It was cancelled just after its turn came.
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


class FairLine:
    """A line for what is served in a few places, in turn over the owners (API keys) that wait.

    At most `max_waiting` wait, those that are served included. With several `places` an owner has one at a time.
    `what`: the plural of what is served, for errors.
    """

    def __init__(self, max_waiting: int, what: str, places: int = 1) -> None:
        self._max_waiting = max_waiting
        self._what = what
        self._free = places
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # The next owner is first.
        self._counts: dict[str, int] = {}  # Owner -> number of those that wait and are served.
        self._served: set[str] = set()  # Owners that are served.

    def __len__(self) -> int:
        return sum(self._counts.values())

    @asynccontextmanager
    async def turn(self, owner: str, most_of_owner: int) -> AsyncGenerator[None, None]:
        """Wait for the turn of an owner's request, which lasts as long as the context. Raises as `enter` does."""
        await self.enter(owner, most_of_owner)
        try:
            yield
        finally:
            self.leave(owner)

    async def enter(self, owner: str, most_of_owner: int | None) -> None:
        """Wait for the turn of an owner's request, which lasts until `leave`.

        Raise OverLimitError if the line, or the part of it that the owner may use, is full. None: it is never full,
        for what a running request still needs.
        """
        if most_of_owner is not None:
            self._check_room(owner, most_of_owner)
        self._counts[owner] = self._counts.get(owner, 0) + 1
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(waiter)
        self._serve()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # It was cancelled just after its turn came.
                self.leave(owner)
            else:
                self._uncount(owner)
            raise

    def _check_room(self, owner: str, most_of_owner: int) -> None:
        if len(self) >= self._max_waiting:
            raise OverLimitError(GRAMMAR_CHECKS, f"the server has too many {self._what} in line; try again later")
        if self._counts.get(owner, 0) >= most_of_owner:
            raise OverLimitError(
                KEY_SHARE, f"this API key has too many {self._what} in line (--max-key-share); try again later"
            )

    def leave(self, owner: str) -> None:
        """End an owner's turn."""
        self._uncount(owner)
        self._served.discard(owner)
        self._free += 1
        self._serve()

    def _uncount(self, owner: str) -> None:
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def _serve(self) -> None:
        """Give the free places to the first waiters of the next owners that have none."""
        while self._free and (owner := self._next_owner()) is not None:
            line = self._lines.pop(owner)
            waiter = line.popleft()
            if line:
                self._lines[owner] = line  # The owner goes behind the others.
            if not waiter.done():
                self._free -= 1
                self._served.add(owner)
                waiter.set_result(None)

    def _next_owner(self) -> str | None:
        return next((owner for owner in self._lines if owner not in self._served), None)
