"""Responses that may be asked for again: those that have ended, and those that run in the background.

In memory, within a number and a size; the oldest make room. Each has an owner, and is unknown to all others. Knows no
HTTP and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from pagoda.server.http.fields.errors import ResponseNotFoundError

OVERHEAD: Final = 1024
"""Bytes that a response is counted beside its own."""


class StoredResponse:
    """One response. `items`: what was said up to its end, as JSON, to go on from; empty until then.

    `events`: of a stream that may be read again; None for others. `task`: runs it, in the background. `snapshot`: the
    response in its current state, as JSON. `owner`: digest of the key that may read it, see auth.owner_of.
    """

    def __init__(
        self, response_id: str, snapshot: Callable[[], bytes], *, owner: bytes, keeps_events: bool = False
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.status: str | None = None
        self.items = b""
        self._body = b""
        self._snapshot: Callable[[], bytes] | None = snapshot
        self.events: list[bytes] | None = [] if keeps_events else None
        self.task: asyncio.Task[None] | None = None
        self._events_size = 0
        self._news = asyncio.Event()

    @property
    def key(self) -> tuple[bytes, str]:
        """Owner and id: two owners may use the same id."""
        return self.owner, self.id

    @property
    def running(self) -> bool:
        """Whether it has not ended; its status is known from then on."""
        return self.status is None

    @property
    def body(self) -> bytes:
        """The response, as JSON."""
        return self._body if self._snapshot is None else self._snapshot()

    @property
    def background(self) -> bool:
        """Whether it runs, or ran, in the background."""
        return self.task is not None

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return OVERHEAD + len(self._body) + len(self.items) + self._events_size

    def add_event(self, event: bytes) -> None:
        """Another event of its stream."""
        if self.events is not None:
            self.events.append(event)
            self._events_size += len(event)
        self._wake()

    def end(self, status: str, items: bytes) -> None:
        """It has ended. `items`: all that was said."""
        self._body, self._snapshot = self.body, None
        self.status, self.items = status, items
        self._wake()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Its events from number `first` on, until it has ended."""
        events = self.events or []
        while True:
            news = self._news
            while first < len(events):
                yield events[first]
                first += 1
            if not self.running:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class ResponseStore:
    """At most `max_count` responses of at most `max_bytes` together. 0: none."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._held: dict[tuple[bytes, str], StoredResponse] = {}  # oldest first
        self._sizes: dict[tuple[bytes, str], int] = {}
        self._size = 0

    @property
    def keeps(self) -> bool:
        """Whether anything can be stored."""
        return self._max_count > 0 and self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, response_id: str, owner: bytes) -> bool:
        """Whether `owner` has a response of that id."""
        return (owner, response_id) in self._held

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """The owner's response of that id. Raises ResponseNotFoundError, for another owner's too."""
        found = self._held.get((owner, response_id))
        if found is None:
            raise ResponseNotFoundError(
                f"there is no response {response_id[:200]!r}: it was not stored, was deleted, or made room for others"
            )
        return found

    def put(self, response: StoredResponse) -> None:
        """Keep a response; one of the same owner and id makes room, and ends if it runs."""
        if response.key in self._held:
            self._drop(self._held[response.key])
        self._held[response.key] = response
        self._sizes[response.key] = 0
        self.resize(response)

    def resize(self, response: StoredResponse) -> None:
        """Count a response anew, which has grown. Others make room, the oldest first; one too large goes itself."""
        if self._held.get(response.key) is not response:
            return
        size = response.size
        self._size += size - self._sizes[response.key]
        self._sizes[response.key] = size
        if size > self._max_bytes:
            self._drop(response)
        while self._held and (len(self._held) > self._max_count or self._size > self._max_bytes):
            self._drop(self._oldest())

    def delete(self, response_id: str, owner: bytes) -> None:
        """Forget a response, which ends one that runs. Raises ResponseNotFoundError."""
        self._drop(self.get(response_id, owner))

    def _oldest(self) -> StoredResponse:
        """The oldest that has ended, else the oldest that runs."""
        ended = (response for response in self._held.values() if not response.running)
        return next(ended, None) or next(iter(self._held.values()))

    def _drop(self, response: StoredResponse) -> None:
        del self._held[response.key]
        self._size -= self._sizes.pop(response.key)
        if response.task is not None and response.running:
            response.task.cancel()
