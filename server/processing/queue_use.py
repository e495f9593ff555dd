"""What unfinished requests use of the queue, in total, by API key and by the caller's request, and the limits on it."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from pagoda.common.engine.messages import GRAMMAR_CHECKS, KEY_SHARE, OVERLOAD, QUEUED_REQUESTS, QUEUED_TOKENS
from pagoda.common.errors import QueueFullError, RequestError


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of a request, and prompt tokens of all of them."""

    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def __sub__(self, other: Load) -> Load:
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


T = TypeVar("T")

_NOTHING: Final = Load()

CALM_SECONDS: Final = 10.0

SHORT_QUEUE: Final = 4
"""Divides how many may wait while as many are refused within CALM_SECONDS: then a queue adds latency only."""


class QueueUse:
    """The loads of unfinished requests. `owner`, `group`: of a request, as in RequestOrigin."""

    def __init__(self) -> None:
        self.total = _NOTHING
        self._requests: dict[str, tuple[str, str, Load]] = {}
        self._owners: dict[str, Load] = {}  # of those with unfinished requests
        self._groups: dict[str, Load] = {}  # by id, of those without a group

    @property
    def callers(self) -> int:
        """Number of callers' requests, however many prompts and sequences they have."""
        return len(self._groups)

    @property
    def owners(self) -> Mapping[str, Load]:
        """The loads of owners with unfinished requests."""
        return self._owners

    def of(self, owner: str) -> Load:
        """Return the load of an owner's requests."""
        return self._owners.get(owner, _NOTHING)

    def of_group(self, group: str) -> Load:
        """Return the load of the other prompts of a caller's request."""
        return self._groups.get(group, _NOTHING)

    def add(self, request_id: str, load: Load, owner: str = "", group: str = "") -> None:
        """Count a request until `remove`. Raises RequestError if its id is in use."""
        if request_id in self._requests:
            raise RequestError("request_id", f"request_id {request_id!r} is in use")
        group = group or request_id
        self._requests[request_id] = owner, group, load
        self.total += load
        self._owners[owner] = self.of(owner) + load
        self._groups[group] = self.of_group(group) + load

    def remove(self, request_ids: Iterable[str]) -> None:
        """Count requests no longer; unknown ids are skipped."""
        for request_id in request_ids:
            if (counted := self._requests.pop(request_id, None)) is None:
                continue
            owner, group, load = counted
            self.total -= load
            for loads, name in ((self._owners, owner), (self._groups, group)):
                if name in loads:
                    loads[name] -= load
                    if not loads[name].sequences:
                        del loads[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on the load of all unfinished requests. None: unlimited."""

    sequences: int | None = None  # --max-num-queued-reqs
    tokens: int | None = None  # --max-num-queued-tokens
    waiting: int = 0  # sequences without a slot, above which the server is overloaded
    overload_seconds: float | None = None  # --max-overload-seconds
    key_share: float = 1.0  # of each bound, that one key may use

    def share(self, limit: int) -> int:
        """Return what one key may use of a limit, at least 1."""
        return max(1, int(limit * self.key_share))

    def check(
        self,
        use: QueueUse,
        load: Load,
        owner: str = "",
        group: str = "",
        others: Load = _NOTHING,
        others_of_owner: Load = _NOTHING,
    ) -> None:
        """Raise OverLimitError if a request does not fit now, RequestError if it never will.

        A request of many prompts never fits if all of them together do not. `others`: load of other API server
        processes; `others_of_owner`: that part of it which is the owner's.
        """
        total = use.total + others
        own = use.of(owner) + others_of_owner
        whole = use.of_group(group) + load
        parts = (
            ("n", "sequences", load.sequences, whole.sequences, total.sequences, own.sequences, self.sequences),
            ("prompt", "prompt tokens", load.tokens, whole.tokens, total.tokens, own.tokens, self.tokens),
        )
        for field, what, needed, together, used, used_by_key, limit in parts:
            if limit is None or not needed:
                continue
            reason = QUEUED_REQUESTS if field == "n" else QUEUED_TOKENS
            flag = "--" + reason.replace("_", "-")
            share = self.share(limit)
            if together > share:
                shown = f"{limit} ({flag})" if share == limit else f"{share} ({flag} x --max-key-share)"
                raise RequestError(field, f"{together} {what} are above the limit of {shown}; send fewer")
            if used + needed > limit:
                raise OverLimitError(
                    reason, f"the server has {used} of {limit} {what} in progress ({flag}); try again later"
                )
            if used_by_key + needed > share:
                raise OverLimitError(
                    KEY_SHARE,
                    f"this API key has {used_by_key} of its {share} {what} in progress (--max-key-share); try again "
                    "later",
                )


class Overload:
    """Whether more sequences wait for a slot than may, for longer than they may.

    A burst that ends is no overload; for CALM_SECONDS after a refusal no further one is accepted. Nor is one request
    of many sequences: those of others take turns with it. Once as many later requests were refused as wait above the
    limit, those are `surplus`: the burst was the begin of an overload. While it goes on the limit is lower.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since: float | None = None  # more wait than may
        self._refused = -math.inf
        self._num_refused = 0  # while more wait than may
        self._counted_since = -math.inf  # refusals within CALM_SECONDS
        self._num_counted = 0
        self._short_until = -math.inf  # SHORT_QUEUE applies

    def observe(self, running: int, waiting: int, limits: QueueLimits) -> None:
        """Take over how many sequences run and wait after a step."""
        self._running = running
        if waiting <= limits.waiting:
            self._since = None
            self._num_refused = 0
        elif self._since is None:
            self._since = self._clock()

    def check(self, limits: QueueLimits, in_progress: int) -> None:
        """Raise OverLimitError if the server is overloaded. `in_progress`: callers' requests, running ones included."""
        if limits.overload_seconds is None:
            return
        now = self._clock()
        waiting = in_progress - self._running
        limit = self._limit(limits, now)
        if waiting <= limit:
            return
        stands = self._since is not None and now - self._since >= limits.overload_seconds
        if stands or now - self._refused < CALM_SECONDS:
            self._count(now, limits)
            raise OverLimitError(
                OVERLOAD,
                f"{waiting} requests wait, more than {limit} for over {limits.overload_seconds:g} s "
                "(--max-overload-seconds); try again later",
            )

    def _limit(self, limits: QueueLimits, now: float) -> int:
        return limits.waiting // SHORT_QUEUE if now < self._short_until else limits.waiting

    def _count(self, now: float, limits: QueueLimits) -> None:
        self._refused = now
        self._num_refused += 1
        if now - self._counted_since >= CALM_SECONDS:
            self._counted_since = now
            self._num_counted = 0
        self._num_counted += 1
        if self._num_counted >= limits.waiting:
            self._counted_since = now
            self._num_counted = 0
            self._short_until = now + CALM_SECONDS

    def surplus(self, limits: QueueLimits, in_progress: int, own: int) -> int:
        """Return how many callers' requests of this process are to be refused although they were accepted.

        `in_progress`: as of `check`, `own` of them of this process.
        """
        waiting = in_progress - self._running - limits.waiting
        if not self._num_refused or waiting <= 0:
            return 0
        surplus = waiting * own // in_progress
        return surplus if surplus <= self._num_refused else 0


def last_of_most(waiting: Mapping[str, list[T]], count: int) -> list[T]:
    """Return `count` items, each time the last one of the owner that has most left."""
    left = [(-len(items), owner) for owner, items in waiting.items() if items]
    heapq.heapify(left)
    chosen: list[T] = []
    while left and len(chosen) < count:
        length, owner = left[0]
        chosen.append(waiting[owner][-length - 1])
        if length == -1:
            heapq.heappop(left)
        else:
            heapq.heapreplace(left, (length + 1, owner))
    return chosen


class OverLimitError(QueueFullError):
    """A request that does not fit now. `reason`: the limit, one of REJECTION_REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def displaced() -> OverLimitError:
    """Return the error of a request that was accepted before it showed that the server is overloaded."""
    return OverLimitError(
        OVERLOAD,
        "the server is overloaded, and this request was among the last of those that wait (--max-overload-seconds); "
        "try again later",
    )


class FairLine:
    """A line for what is served in a few places, in turn over the owners (API keys) that wait.

    At most `max_waiting` wait, those that are served included. With several `places` an owner has one at a time.
    `what`: the plural of what is served, for errors.
    """

    def __init__(self, max_waiting: int, what: str, places: int = 1) -> None:
        self._max_waiting = max_waiting
        self._what = what
        self._free = places
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # next owner first
        self._counts: dict[str, int] = {}  # waiting and served, by owner
        self._served: set[str] = set()  # owners

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

    async def enter(self, owner: str, most_of_owner: int) -> None:
        """Wait for the turn of an owner's request, which lasts until `leave`.

        Raise OverLimitError if the line, or the part of it that the owner may use, is full.
        """
        if len(self) >= self._max_waiting:
            raise OverLimitError(GRAMMAR_CHECKS, f"the server has too many {self._what} in line; try again later")
        if self._counts.get(owner, 0) >= most_of_owner:
            raise OverLimitError(
                KEY_SHARE, f"this API key has too many {self._what} in line (--max-key-share); try again later"
            )
        self._counts[owner] = self._counts.get(owner, 0) + 1
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(waiter)
        self._serve()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # cancelled just after its turn came
                self.leave(owner)
            else:
                self._uncount(owner)
            raise

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
                self._lines[owner] = line  # behind the other owners
            if not waiter.done():
                self._free -= 1
                self._served.add(owner)
                waiter.set_result(None)

    def _next_owner(self) -> str | None:
        return next((owner for owner in self._lines if owner not in self._served), None)
