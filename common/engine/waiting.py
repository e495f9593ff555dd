"""Requests in line for a row: first come first served, or by priority. Every operation is O(1) or O(log n)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from pagoda.common.engine.request import Request


class WaitingQueue(Protocol):
    """The line. `push_front` takes back a preempted request; `peek` and `pop` raise IndexError when it is empty."""

    def push(self, request: Request) -> None:
        """Join the line."""
        ...

    def push_front(self, request: Request) -> None:
        """Join before all others of the same rank."""
        ...

    def peek(self) -> Request:
        """Who is next. Raises IndexError when nobody waits."""
        ...

    def pop(self) -> Request:
        """Take who is next. Raises IndexError when nobody waits."""
        ...

    def remove(self, request_id: str) -> Request | None:
        """Leave the line; None if not in it."""
        ...

    def __len__(self) -> int: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        """Join at the end."""
        self._line[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Join at the head."""
        self._line[request.request_id] = request
        self._line.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Who is next. Raises IndexError when nobody waits."""
        if not self._line:
            raise IndexError("nobody is waiting")
        return self._line[next(iter(self._line))]

    def pop(self) -> Request:
        """Take who is next. Raises IndexError when nobody waits."""
        if not self._line:
            raise IndexError("nobody is waiting")
        return self._line.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        """Leave the line; None if not in it."""
        return self._line.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._line)


class PriorityQueue:
    """By rank: (priority, arrival, order of adding). Removed requests stay in the heap until they reach its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._live: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        """Join at the place that the rank gives."""
        self._live[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def push_front(self, request: Request) -> None:
        """The rank alone decides, and it is unique."""
        self.push(request)

    def peek(self) -> Request:
        """Who is next. Raises IndexError when nobody waits."""
        return self._live[self._settle()]

    def pop(self) -> Request:
        """Take who is next. Raises IndexError when nobody waits."""
        request_id = self._settle()
        heapq.heappop(self._heap)
        return self._live.pop(request_id)

    def remove(self, request_id: str) -> Request | None:
        """Leave the line; None if not in it."""
        return self._live.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._live)

    def _settle(self) -> str:
        """Drop removed requests from the top of the heap; the id of the first live one."""
        while self._heap:
            rank, request_id = self._heap[0]
            request = self._live.get(request_id)
            if request is not None and request.rank == rank:
                return request_id
            heapq.heappop(self._heap)
        raise IndexError("nobody is waiting")
