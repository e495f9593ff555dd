"""The queue of waiting sequences that keeps one key or one request from starving others.

The next row goes to the key that runs the fewest sequences, of the others the one served longest ago; within a key to
the request that runs the fewest sequences, then to the one that came first. Sequences of one key, one per request, are
thus served in the order in which they came.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pagoda.common.engine.scheduling.request import NO_ROW, Request, SchedulerPart, WaitingQueue

Rank = tuple[float, ...]

_SPARE_ENTRIES: Final = 64
"""Outdated entries of a heap, beyond four per group, at which it is built again."""


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one caller's request. Entries of `heap` that are no longer waiting are skipped."""

    running: int = 0
    waiting: dict[str, Request] = field(default_factory=dict)
    heap: list[tuple[Rank, str]] = field(default_factory=list)

    def first(self) -> Request | None:
        """Return the waiting sequence that came first; None if none waits."""
        while self.heap:
            rank, request_id = self.heap[0]
            request = self.waiting.get(request_id)
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self.heap)
        return None


@dataclass(slots=True, eq=False)
class _Owner:
    """The requests of one key. `heap` has (running, rank, group) of groups; outdated entries are skipped."""

    running: int = 0
    served: int = 0  # number of rows given when it last got one
    groups: dict[str, _Group] = field(default_factory=dict)
    heap: list[tuple[int, Rank, str]] = field(default_factory=list)

    def touch(self, name: str) -> None:
        """Enter a group with its present state; drop it once it has no sequence."""
        group = self.groups[name]
        if (request := group.first()) is not None:
            heapq.heappush(self.heap, (group.running, request.rank, name))
        elif not group.running:
            del self.groups[name]
        if len(self.heap) > 4 * len(self.groups) + _SPARE_ENTRIES:
            first = ((name, group, group.first()) for name, group in self.groups.items())
            self.heap = [(group.running, request.rank, name) for name, group, request in first if request is not None]
            heapq.heapify(self.heap)

    def first(self) -> Request | None:
        """Return the sequence that is next; None if none waits."""
        while self.heap:
            running, rank, name = self.heap[0]
            group = self.groups.get(name)
            request = None if group is None else group.first()
            if group is not None and request is not None and (group.running, request.rank) == (running, rank):
                return request
            heapq.heappop(self.heap)
        return None


@dataclass(frozen=True, slots=True)
class FairState:
    """The state of a FairQueue but for its requests."""

    served: Mapping[str, int]  # key -> number of rows given when it last got one
    rows_given: int
    lacks_blocks: bool


class FairQueue(WaitingQueue, SchedulerPart[FairState]):
    """Sequences that wait for a row, fair between keys and between requests. The scheduler reports which run."""

    def __init__(self) -> None:
        self.lacks_blocks = False
        """The next sequence could not start for lack of blocks."""
        self._owners: dict[str, _Owner] = {}
        self._requests: dict[str, Request] = {}
        self._rows_given = 0
        self._next: Request | None = None

    def push(self, request: Request) -> None:
        owner, group = self._of(request)
        group.waiting[request.request_id] = request
        heapq.heappush(group.heap, (request.rank, request.request_id))
        self._requests[request.request_id] = request
        owner.touch(request.group)
        self._next = None

    def _of(self, request: Request) -> tuple[_Owner, _Group]:
        """Return the key and the group of a sequence; enters those that have no other one."""
        owner = self._owners.get(request.owner)
        if owner is None:
            owner = self._owners[request.owner] = _Owner()
        group = owner.groups.get(request.group)
        if group is None:
            group = owner.groups[request.group] = _Group()
        return owner, group

    def push_front(self, request: Request) -> None:
        self.push(request)  # Its rank puts it before those that came later.

    def peek(self) -> Request:
        if self._next is None:
            firsts = [(owner, first) for owner in self._owners.values() if (first := owner.first()) is not None]
            if not firsts:
                raise IndexError("no request is waiting")
            self._next = min(
                firsts, key=lambda candidate: (candidate[0].running, candidate[0].served, candidate[1].rank)
            )[1]
        return self._next

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            owner = self._owners[request.owner]
            del owner.groups[request.group].waiting[request_id]
            self._update(request, owner)
        return request

    def __len__(self) -> int:
        return len(self._requests)

    def started(self, request: Request) -> None:
        """Count a sequence that was popped as running."""
        owner, group = self._of(request)
        owner.running += 1
        self._rows_given += 1
        owner.served = self._rows_given
        group.running += 1
        self._update(request, owner)

    def stopped(self, request: Request) -> None:
        """Count a sequence as no longer running."""
        owner = self._owners[request.owner]
        owner.running -= 1
        owner.groups[request.group].running -= 1
        self._update(request, owner)

    def state(self) -> FairState:
        served = {name: owner.served for name, owner in self._owners.items()}
        return FairState(served=served, rows_given=self._rows_given, lacks_blocks=self.lacks_blocks)

    def restore(self, state: FairState, requests: Sequence[Request]) -> None:
        """Replace the state. The waiting ones of `requests` are in the queue."""
        for request in requests:
            if request.row != NO_ROW:
                self.started(request)
        for name, owner in self._owners.items():
            owner.served = state.served.get(name, 0)
        self._rows_given = state.rows_given
        self.lacks_blocks = state.lacks_blocks
        self._next = None

    def make_room(self, num_free: int, running: Sequence[Request]) -> Request | None:
        """Return the sequence to preempt because it keeps the next waiting one from running at all; None if none does.

        `num_free`: free rows. `running`: by rank.
        """
        if num_free and not self.lacks_blocks:
            return None
        self.lacks_blocks = False
        return self.victim(running) if running else None

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Return the running sequence, of `running` by rank, that the next waiting one should replace.

        None unless its request runs nothing, and either another key runs at least two sequences more than its own, or
        another request of its key runs at least two. The newest sequence of the key's largest request is replaced.
        """
        request = self.peek()
        owner = self._owners[request.owner]
        if owner.groups[request.group].running:
            return None
        largest = max(self._owners.values(), key=lambda owner: (owner.running, owner.served))
        if largest.running < owner.running + 2:
            largest = owner
        most = max(group.running for group in largest.groups.values())
        if largest is owner and most < 2:
            return None
        for candidate in reversed(running):
            if self._owners[candidate.owner] is largest and largest.groups[candidate.group].running == most:
                return candidate
        return None

    def _update(self, request: Request, owner: _Owner) -> None:
        owner.touch(request.group)
        if not owner.groups:
            del self._owners[request.owner]
        self._next = None
