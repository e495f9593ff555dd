"""The API process's side of an engine: the client protocol, supervision, the client of an event loop, and admission.

Implementations of the protocol: ProcessClient (process_client) and ThreadClient (engine).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.core import ASLEEP, SLEEP_TAGS, check_sleep, check_wake_up
from pagoda.common.engine.messages import KEY_SHARE, OVERLOAD, QUEUED_REQUESTS, QUEUED_TOKENS, EngineStats
from pagoda.common.errors import (
    EngineDeadError,
    EngineRestartingError,
    EngineUnavailableError,
    QueueFullError,
    RequestError,
    SleepError,
)
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Command,
    EngineInfo,
    Failed,
    FromEngine,
    Heartbeat,
    OtherUse,
    Ready,
    Reply,
    Restarting,
    Sleep,
    SleepState,
    StepReply,
    ToEngine,
    WakeUp,
)

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 0.25
"""Interval at which a client checks that its engine makes progress."""

Listener = Callable[[FromEngine], None]
"""Called in the event loop for every message; the last message of a dead engine is Failed."""


class EngineClient(Protocol):
    """One engine. Constructing a client starts it and returns at once."""

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        ...

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Deliver messages to `listener` in `loop` from now on; replaces an earlier listener."""
        ...

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError if the engine is dead."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead, EngineUnavailableError if it is silent, stuck or restarting."""
        ...

    def kill(self, cause: str) -> None:
        """End an engine that is stuck, at once. Its last message is Failed with `cause`."""
        ...

    @property
    def others(self) -> OtherUse:
        """What unfinished requests of the engine's other clients use."""
        ...

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        ...


class StartingClient(EngineClient, Protocol):
    """An EngineClient whose start can be watched together with others'."""

    def poll_ready(self, timeout_ms: int) -> EngineInfo | None:
        """Return the engine's description if it is warm within the time. Raises what kept it from starting."""
        ...


class NoEngine:
    """Implements EngineClient without an engine, for an application that is only built to be checked."""

    def wait_ready(self) -> EngineInfo:
        raise _no_engine()

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None: ...

    def send(self, command: ToEngine) -> None:
        raise _no_engine()

    def check(self) -> None:
        raise _no_engine()

    def kill(self, cause: str) -> None: ...
    @property
    def others(self) -> OtherUse:
        return NO_OTHERS

    def close(self, timeout: float = 2.0) -> None: ...


def _no_engine() -> EngineDeadError:
    return EngineDeadError("no engine was started")


class Supervisor:
    """Tracks from an engine's messages whether it failed, is silent, or is stuck in a step. `clock`: seconds."""

    def __init__(self, config: RuntimeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silence_timeout = config.rpc_timeout / 1000
        self._step_timeout = config.engine_iteration_timeout_s
        self.failed: Failed | None = None
        self.ready = False
        self._last_message = self._last_progress = clock()
        self._steps = 0
        self._busy = False

    def note(self, message: FromEngine) -> None:
        """Record a message from the engine."""
        self._last_message = self._clock()
        match message:
            case Heartbeat(steps, busy):
                if steps != self._steps or not busy:
                    self._last_progress = self._last_message
                self._steps = steps
                self._busy = busy
            case StepReply():
                self._last_progress = self._last_message
            case Ready():
                self.ready = True
                self._last_progress = self._last_message
            case Failed():
                self.failed = self.failed or message
            case _:
                pass

    def check(self) -> None:
        """Raise EngineDeadError if the engine failed, EngineUnavailableError if it is silent or makes no progress."""
        if self.failed is not None:
            raise EngineDeadError(self.failed.message)
        now = self._clock()
        if now - self._last_message > self._silence_timeout:
            raise EngineUnavailableError(f"the engine has not answered for {now - self._last_message:.0f} s")
        if self.ready and self._busy and now - self._last_progress > self._step_timeout:
            raise EngineUnavailableError(f"the engine has been in one step for {now - self._last_progress:.0f} s")


class CoreClientAsync:
    """Sends one engine's commands and matches replies to calls, in the loop that `attach` was last called in.

    `listener` gets every message except Failed. `on_death` is called once, before pending calls fail. A stuck engine
    is killed with `kills_stuck`; else `on_stuck` is called, and again when it is stuck after it continued.
    """

    def __init__(
        self,
        client: EngineClient,
        listener: Listener,
        on_death: Callable[[EngineDeadError], None],
        on_stuck: Callable[[EngineUnavailableError], None] = lambda error: None,
        *,
        kills_stuck: bool = False,
    ) -> None:
        self._client = client
        self._listener = listener
        self._on_death = on_death
        self._on_stuck = on_stuck
        self._kills_stuck = kills_stuck
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._dead: EngineDeadError | None = None
        self._unavailable: EngineUnavailableError | None = None
        # Not from 0: the process before this one may have calls of its own, whose replies come to this one.
        self._tickets = itertools.count(secrets.randbits(32))
        self._replies: dict[int, asyncio.Future[Reply]] = {}

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine died; None while it lives."""
        return self._dead

    def raise_if_unavailable(self) -> None:
        """Raise EngineDeadError with the cause if the engine is dead, EngineUnavailableError if stuck or restarting."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._unavailable is not None:
            raise EngineUnavailableError(str(self._unavailable))

    def wait_ready(self) -> EngineInfo:
        """Block until the engine is warm. Raises what kept it from starting."""
        return self._client.wait_ready()

    def attach(self) -> None:
        """Receive the engine's messages in the running loop, and watch its progress there."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._client.listen(loop, self._receive)
            if self._watching is not None:
                self._watching.cancel()
            self._watching = loop.call_later(WATCH_SECONDS, self._watch, loop)

    def send(self, command: ToEngine) -> None:
        """Queue a command. Raises EngineDeadError if the engine is dead, EngineUnavailableError if it restarts."""
        try:
            self._client.send(command)
        except EngineUnavailableError:
            raise
        except EngineDeadError as error:
            self.die(error)
            raise

    def send_if_alive(self, command: ToEngine) -> None:
        """Queue a command that a dead engine, or one that restarts, need not get."""
        if self._dead is None:
            with suppress(EngineDeadError):
                self.send(command)

    async def call(self, command: Callable[[int], Command]) -> Reply:
        """Queue the command made with a new ticket and wait for its reply. Raises EngineDeadError."""
        self.attach()
        self.raise_if_unavailable()
        ticket = next(self._tickets)
        self.send(command(ticket))
        reply = self._replies[ticket] = asyncio.get_running_loop().create_future()
        return await reply

    @property
    def others(self) -> OtherUse:
        """Number of unfinished sequences of the engine's other clients."""
        return self._client.others

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead, EngineUnavailableError if it is stuck or restarts."""
        self.raise_if_dead()
        self._client.check()
        self._note_progress()

    def _note_progress(self) -> None:
        """Accept requests again, at once: a health check that succeeds must not be followed by a refusal."""
        if self._unavailable is not None:
            logger.warning("the engine continues")
            self._unavailable = None

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the cause if the engine is dead."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def die(self, error: EngineDeadError) -> None:
        """Mark the engine dead, once, and fail pending calls."""
        if self._dead is not None:
            return
        self._dead = error
        self._on_death(error)
        self._fail_calls(error)

    def _fail_calls(self, error: EngineDeadError) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(type(error)(str(error)))
        self._replies.clear()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Act if the engine is dead or stuck, or continues; look again later."""
        if self._dead is not None or loop is not self._loop:
            return
        try:
            self._client.check()
        except EngineUnavailableError as error:
            self._take_stuck(error)
        except EngineDeadError as error:
            self.die(error)
        else:
            self._note_progress()
        self._watching = loop.call_later(WATCH_SECONDS, self._watch, loop)

    def _take_stuck(self, error: EngineUnavailableError) -> None:
        if self._unavailable is not None:  # The problem is known, or the engine restarts.
            return
        self._unavailable = error
        logger.error("%s", error)
        if self._kills_stuck:
            self._client.kill(str(error))
        else:
            self._on_stuck(error)

    def close(self, timeout: float = 2.0) -> None:
        """End the engine, by force after `timeout` seconds. Idempotent."""
        self._client.close(timeout)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.die(EngineDeadError(message.message))
            return
        if isinstance(message, Restarting) and message.request_ids is None:
            self._unavailable = restarting(message.cause)
            self._fail_calls(self._unavailable)
        elif isinstance(message, Ready):
            self._unavailable = None
        self._listener(message)
        if isinstance(message, Reply):
            reply = self._replies.pop(message.ticket, None)
            if reply is not None and not reply.done():
                reply.set_result(message)


def restarting(cause: str) -> EngineRestartingError:
    """Return the error while an engine is replaced. `cause`: why it ended."""
    return EngineRestartingError(f"the engine is being restarted: {cause}")


# Admission: a request is accepted unless the queue is full, generation is paused, or memory is asleep.


class Admission:
    """Decides whether a request is accepted. `use`: returns what unfinished requests use, running and queued ones.
    `on_rejected` is called with the limit that a request exceeds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        engine: CoreClientAsync,
        sleep: AsyncSleep,
        use: Callable[[], QueueUse],
        on_rejected: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = QueueLimits(sequences=config.max_num_queued_reqs, tokens=config.max_num_queued_tokens)
        self._config = config
        self._engine = engine
        self._sleep = sleep
        self._use = use
        self._on_rejected = on_rejected
        self._overload = Overload(clock)

    def observe(self, stats: EngineStats) -> None:
        """Take over what the engine reports after a step."""
        self._overload.observe(stats.running, stats.waiting, self.limits)

    def surplus(self) -> int:
        """Return how many callers' requests that wait are to be refused after all, see Overload."""
        callers = self._use().callers
        return self._overload.surplus(self.limits, callers + self._engine.others.callers, callers)

    def check_new(self, load: Load, owner: str) -> None:
        """As `check`, for what a caller asks for, before any of it is processed: also refused during an overload."""
        self.check(load, owner)
        self.check_overload()

    def check_overload(self) -> None:
        """Raise OverLimitError during an overload, whatever a new request asks for."""
        with self.counting():
            self._overload.check(self.limits, self._use().callers + self._engine.others.callers)

    def check(self, load: Load, owner: str = "", group: str = "") -> None:
        """Raise EngineDeadError, SleepError, QueueFullError, or RequestError if the queue can never hold the load.

        `owner`, `group`: of the request, as in RequestOrigin.
        """
        self._engine.raise_if_unavailable()
        self._sleep.raise_if_asleep()
        with self.counting():
            others = self._engine.others
            self.limits.check(
                self._use(),
                load,
                owner=owner,
                group=group,
                others=Load(others.sequences, others.tokens),
                others_of_owner=Load(*others.owners.get(owner, ())),
            )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Report requests that are refused within this context for a limit."""
        try:
            yield
        except OverLimitError as error:
            self._on_rejected(error.reason)
            raise

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that the scheduling policy ignores."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")


class Gate:
    """Requests wait while it is closed. Open at first; belongs to the event loop in which it is first awaited."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None

    @property
    def closed(self) -> bool:
        """True while requests wait."""
        return self._open is not None

    def close(self) -> None:
        """Make requests wait."""
        if self._open is None:
            self._open = asyncio.Event()

    def open(self) -> None:
        """Let waiting requests continue."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._open is not None:
            await self._open.wait()


class AsyncSleep:
    """The API process's view of which parts of the engine's memory are offloaded."""

    def __init__(self, config: ModelConfig, engine: CoreClientAsync) -> None:
        self._config = config
        self._engine = engine
        self._asleep: tuple[str, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """True while a part is offloaded or about to be."""
        return bool(self._asleep)

    def raise_if_asleep(self) -> None:
        """Raise SleepError while a part is offloaded."""
        if self._asleep:
            raise SleepError(ASLEEP)

    def begin(self, level: int, mode: str) -> None:
        """Count the engine as asleep from now on; `sleep` must follow.

        Raises RequestError for an unknown level or mode, ConfigError for an engine that cannot sleep.
        """
        check_sleep(self._config, level, mode)
        self._asleep = SLEEP_TAGS

    async def sleep(self, level: int) -> None:
        """Free the memory once no request runs. Raises SleepError, EngineDeadError."""
        await self._change(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Restore the named parts, or all. Raises RequestError, ConfigError, SleepError, EngineDeadError."""
        checked = check_wake_up(self._config, tags)
        await self._change(lambda ticket: WakeUp(ticket, checked))

    def reset(self) -> None:
        """Count the engine as awake: it was restarted."""
        self._asleep = ()

    def update(self, state: SleepState) -> None:
        """Take over the engine's state."""
        self._asleep = state.asleep

    async def _change(self, command: Callable[[int], Command]) -> None:
        reply = await self._engine.call(command)
        if isinstance(reply, SleepState) and reply.error:
            raise SleepError(reply.error)


# What unfinished requests use of the queue, in total, by API key and by the caller's request, and the limits on it.


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
"""How long requests are refused after a refusal for an overload, unless the queue is short again."""

OVERLOAD_QUEUE_DIVISOR: Final = 4
"""Divides the queue limit while as many requests are refused within CALM_SECONDS as may wait: a queue then adds latency
only."""


class QueueUse:
    """The loads of unfinished requests. `owner`, `group`: of a request, as in RequestOrigin."""

    def __init__(self) -> None:
        self.total = _NOTHING
        self._requests: dict[str, tuple[str, str, Load]] = {}
        self._owners: dict[str, Load] = {}  # Owner -> load, of those with unfinished requests.
        self._groups: dict[str, Load] = {}  # Group's id -> load; a request without a group has its own.

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

    sequences: int | None = None  # Value of --max-num-queued-reqs.
    tokens: int | None = None  # Value of --max-num-queued-tokens.
    waiting: int = 0  # Number of sequences without a slot above which the server is overloaded.
    overload_seconds: float | None = None  # Value of --max-overload-seconds.
    key_share: float = 1.0  # Share of each bound that one key may use.

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
        of_owner = use.of(owner) + others_of_owner
        of_group = use.of_group(group) + load
        parts = (
            ("n", "sequences", load.sequences, of_group.sequences, total.sequences, of_owner.sequences, self.sequences),
            ("prompt", "prompt tokens", load.tokens, of_group.tokens, total.tokens, of_owner.tokens, self.tokens),
        )
        for field, what, needed, together, used, used_by_key, limit in parts:
            if limit is None or not needed:
                continue
            reason = QUEUED_REQUESTS if field == "n" else QUEUED_TOKENS
            flag = "--" + reason.replace("_", "-")
            share = self.share(limit)
            if together > share:
                shown = f"{limit} ({flag})" if share == limit else f"{share} ({flag} x --max-key-share)"
                raise NeverFitsError(field, f"{together} {what} are above the limit of {shown}; send fewer")
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
        self._since: float | None = None  # Time since which more sequences wait than may.
        self._refused = -math.inf
        self._num_refused = 0  # Number of requests refused while more wait than may.
        self._counted_since = -math.inf  # Start of counting refusals within CALM_SECONDS.
        self._num_counted = 0
        self._short_until = -math.inf  # Until then the queue limit is divided by OVERLOAD_QUEUE_DIVISOR.

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
        return limits.waiting // OVERLOAD_QUEUE_DIVISOR if now < self._short_until else limits.waiting

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

    def surplus(self, limits: QueueLimits, in_progress: int, own_callers: int) -> int:
        """Return how many callers' requests of this process are to be refused although they were accepted.

        `in_progress`: as of `check`, `own_callers` of them of this process.
        """
        waiting = in_progress - self._running - limits.waiting
        if not self._num_refused or waiting <= 0:
            return 0
        surplus = waiting * own_callers // in_progress
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


class NeverFitsError(RequestError):
    """A request whose prompts together are above a limit of the queue, whatever else runs."""


class OverLimitError(QueueFullError):
    """A request that does not fit now: HTTP 429. `reason` names the limit that it exceeds."""

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
