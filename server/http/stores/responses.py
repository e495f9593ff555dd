"""In-memory store of responses: finished ones, and those running in the background.

Bounded in number and size; the oldest of the owner with most of them are evicted. Responses are only visible to their
owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from pagoda.common.engine.scheduling.shares import Shares
from pagoda.server.http.errors import ResponseNotFoundError

OVERHEAD: Final = 1024
"""Bytes that a response counts besides its content."""

ID_SIZE: Final = 256
"""Bytes that an item's id counts, with its entry in the index."""


class StoredResponse:
    """One response. `snapshot` returns its current state as JSON; `keeps_events`: its stream can be read again."""

    def __init__(
        self, response_id: str, snapshot: Callable[[], bytes], *, owner: bytes, keeps_events: bool = False
    ) -> None:
        self.id = response_id
        self.owner = owner  # Digest of the API key that may read it, see server.owner_of.
        self.status: str | None = None  # None while it runs.
        self.items = b""  # The conversation up to its end, as JSON, for follow-up requests; empty while it runs.
        self.num_input_items = 0  # Number of `items` that are input; the others are the output.
        self.item_ids: tuple[str, ...] = ()  # Ids of `items`.
        self._body = b""
        self._snapshot: Callable[[], bytes] | None = snapshot
        self.events: list[bytes] | None = [] if keeps_events else None
        self.task: asyncio.Task[None] | None = None  # The task that runs it in the background.
        self._events_size = 0
        self._changed = asyncio.Event()

    @property
    def key(self) -> tuple[bytes, str]:
        """Owner and id: two owners may use the same id."""
        return self.owner, self.id

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def body(self) -> bytes:
        """The response as JSON."""
        return self._body if self._snapshot is None else self._snapshot()

    @property
    def background(self) -> bool:
        """Whether it runs, or ran, in the background."""
        return self.task is not None

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return OVERHEAD + len(self._body) + len(self.items) + self._events_size + ID_SIZE * len(self.item_ids)

    def add_event(self, event: bytes) -> None:
        if self.events is not None:
            self.events.append(event)
            self._events_size += len(event)
        self._notify()

    def end(self, status: str, items: bytes, item_ids: Sequence[str] = (), num_input_items: int = 0) -> None:
        """Store the final state. `items`: the conversation including the output, as JSON."""
        self._body = self.body
        self._snapshot = None
        self.status = status
        self.items = items
        self.item_ids = tuple(item_ids)
        self.num_input_items = num_input_items
        self._notify()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield its events from number `first` on, until it has ended."""
        events = self.events or []
        while True:
            changed = self._changed
            while first < len(events):
                yield events[first]
                first += 1
            if not self.running:
                return
            await changed.wait()

    def _notify(self) -> None:
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()


class ResponseStore:
    """Stores at most `max_count` responses of at most `max_bytes` in total. 0: none."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._shares: Shares[bytes] = Shares(max_count, max_bytes)
        self._responses: dict[tuple[bytes, str], StoredResponse] = {}  # The responses, oldest first.
        self._sizes: dict[tuple[bytes, str], int] = {}
        # Owner and item id -> the latest response with the item.
        self._by_item: dict[tuple[bytes, str], StoredResponse] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything can be stored."""
        return self._shares.max_count > 0 and self._shares.max_bytes > 0

    def __len__(self) -> int:
        return len(self._responses)

    def contains(self, response_id: str, owner: bytes) -> bool:
        """Return whether `owner` has a response with this id."""
        return (owner, response_id) in self._responses

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """Return the owner's response. Raise ResponseNotFoundError, also for another owner's."""
        response = self._responses.get((owner, response_id))
        if response is None:
            raise ResponseNotFoundError(
                f"there is no response {response_id[:200]!r}: it was not stored, was deleted, or was evicted"
            )
        return response

    def with_item(self, item_id: str, owner: bytes) -> StoredResponse | None:
        """Return the owner's latest response that has ended and whose items include `item_id`, if there is one."""
        return self._by_item.get((owner, item_id))

    def of(self, owner: bytes) -> list[StoredResponse]:
        """Return the owner's responses, oldest first."""
        return [response for (of, _), response in self._responses.items() if of == owner]

    def put(self, response: StoredResponse) -> None:
        """Store a response; it replaces one with the same owner and id, which is cancelled if it runs."""
        if response.key in self._responses:
            self._drop(self._responses[response.key])
        self._responses[response.key] = response
        self._sizes[response.key] = 0
        self._shares.add(response.owner, count=1)
        self.resize(response)

    def resize(self, response: StoredResponse) -> None:
        """Update the size of a response that has grown. Evict others if needed, or itself if it is too large."""
        if self._responses.get(response.key) is not response:
            return
        self._by_item |= dict.fromkeys(((response.owner, item_id) for item_id in response.item_ids), response)
        size = response.size
        self._shares.add(response.owner, size=size - self._sizes[response.key])
        self._sizes[response.key] = size
        if size > self._shares.max_bytes:
            self._drop(response)
        while (owner := self._shares.over()) is not None:
            self._drop(self._oldest(owner))

    def delete(self, response_id: str, owner: bytes) -> None:
        """Delete a response and cancel it if it runs. Raise ResponseNotFoundError."""
        self._drop(self.get(response_id, owner))

    def _oldest(self, owner: bytes) -> StoredResponse:
        """Return the owner's oldest that has ended, else the oldest."""
        stored_by_owner = self.of(owner)
        return next((response for response in stored_by_owner if not response.running), stored_by_owner[0])

    def _drop(self, response: StoredResponse) -> None:
        del self._responses[response.key]
        self._shares.add(response.owner, count=-1, size=-self._sizes.pop(response.key))
        for item in ((response.owner, item_id) for item_id in response.item_ids):
            if self._by_item.get(item) is response:
                del self._by_item[item]
        if response.task is not None and response.running:
            response.task.cancel()
