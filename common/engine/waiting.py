"""Queues of requests that wait for a row: first come first served, or by priority. Operations are O(1) or O(log n)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from pagoda.common.engine.request import Request


class WaitingQueue(Protocol):
    """A queue of waiting requests."""

    def push(self, request: Request) -> None:
        """Add a request."""
        ...

    def push_front(self, request: Request) -> None:
        """Add a preempted request, before all others of the same rank."""
        ...

    def peek(self) -> Request:
        """Return the next request. Raises IndexError when the queue is empty."""
        ...

    def pop(self) -> Request:
        """Remove and return the next request. Raises IndexError when the queue is empty."""
        ...

    def remove(self, request_id: str) -> Request | None:
        """Remove a request; None if it is not in the queue."""
        ...

    def __len__(self) -> int: ...


class FcfsQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue[next(iter(self._queue))]

    def pop(self) -> Request:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        return self._queue.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._queue)


class PriorityQueue(WaitingQueue):
    """By rank: (priority, arrival, order of adding). Removed requests stay in the heap until they reach its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._live: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        self._live[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def push_front(self, request: Request) -> None:
        self.push(request)  # the rank alone decides, and it is unique

    def peek(self) -> Request:
        return self._live[self._drop_removed()]

    def pop(self) -> Request:
        request_id = self._drop_removed()
        heapq.heappop(self._heap)
        return self._live.pop(request_id)

    def remove(self, request_id: str) -> Request | None:
        return self._live.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._live)

    def _drop_removed(self) -> str:
        """Drop removed requests from the top of the heap; return the id of the first live one."""
        while self._heap:
            rank, request_id = self._heap[0]
            request = self._live.get(request_id)
            if request is not None and request.rank == rank:
                return request_id
            heapq.heappop(self._heap)
        raise IndexError("no request is waiting")
