"""The host cache of adapters: their weights are read in a thread, ahead of the requests that wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import zip_longest
from typing import Final, Protocol

from pagoda.common.backend import LoraBackend
from pagoda.common.engine.lora.adapter import LORA_FIELD, Adapter, AdapterLoad
from pagoda.common.engine.lora.slots import SchedulerAdapters
from pagoda.common.engine.messages import EngineOutput
from pagoda.common.engine.steps.contract import ShardPlans, StepPlan
from pagoda.common.errors import PagodaError, RequestError
from pagoda.common.weights.lora.weights import AdapterWeights

logger = logging.getLogger(__name__)

Done = Callable[[RequestError | None], None]

_WAIT_SECONDS: Final = 0.005
"""How long a step waits for an adapter when there is nothing else to do, so that commands are still read."""


class AdapterStore:
    """At most `capacity` adapters in host memory. `read`: reads one from its files; raises RequestError.

    Not thread-safe but for `read`, which runs in a thread of its own.
    """

    def __init__(self, read: Callable[[Adapter], AdapterWeights], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self.loaded: dict[Adapter, AdapterWeights] = {}  # least recently used first
        self._reading: dict[Adapter, Future[AdapterWeights]] = {}
        self._callers: dict[Adapter, list[Done]] = {}
        self._thread = ThreadPoolExecutor(1, "pagoda-lora")

    def want(self, adapters: Iterable[Adapter]) -> None:
        """Start to read those of the first `capacity` adapters that are not there. The others go first to make room."""
        wanted = list(adapters)[: self._capacity]
        for adapter in reversed(wanted):
            if adapter in self.loaded:
                self.loaded[adapter] = self.loaded.pop(adapter)
        for adapter in wanted:
            if adapter not in self.loaded:
                self._start(adapter)

    def _start(self, adapter: Adapter) -> None:
        if adapter not in self._reading:
            self._reading[adapter] = self._thread.submit(self._read, adapter)

    def load(self, adapter: Adapter, done: Done) -> None:
        """Read an adapter unless it is there. `done` is called by `collect`, with the error if there is one."""
        if adapter in self.loaded:
            done(None)
        else:
            self._callers.setdefault(adapter, []).append(done)
            self._start(adapter)

    def load_now(self, adapter: Adapter) -> None:
        """Read an adapter in this thread. Raises RequestError."""
        try:
            self._put(adapter, self._read(adapter))
        except Exception as error:
            raise _refusal(adapter, error) from None

    def collect(self) -> list[tuple[Adapter, RequestError]]:
        """Enter the adapters that were read meanwhile. Returns those that could not be read, with the reason."""
        failures = []
        for adapter in [adapter for adapter, weights in self._reading.items() if weights.done()]:
            weights = self._reading.pop(adapter)
            failed = weights.exception()
            error = None if failed is None else _refusal(adapter, failed)
            if error is None:
                self._put(adapter, weights.result())
            else:
                failures.append((adapter, error))
            for done in self._callers.pop(adapter, ()):
                done(error)
        return failures

    def _put(self, adapter: Adapter, weights: AdapterWeights) -> None:
        self.loaded[adapter] = weights
        while len(self.loaded) > self._capacity:
            del self.loaded[next(iter(self.loaded))]

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._reading)

    def take(self, adapter: Adapter) -> AdapterWeights:
        """Return the weights of an adapter in `loaded`, which is now the last used."""
        weights = self.loaded.pop(adapter)
        self.loaded[adapter] = weights
        return weights

    def drop(self, adapter: Adapter) -> None:
        """Forget the weights of an adapter; an unknown one is skipped."""
        self.loaded.pop(adapter, None)

    def wait(self) -> None:
        """Wait briefly for an adapter that is being read."""
        wait(self._reading.values(), _WAIT_SECONDS, FIRST_COMPLETED)

    def close(self) -> None:
        """End the thread once it has read what it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _refusal(adapter: Adapter, error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PagodaError | OSError):
        return RequestError(LORA_FIELD, f"adapter {adapter.name}: {error}")
    logger.error("adapter %s cannot be read", adapter.name, exc_info=error)
    return RequestError(LORA_FIELD, f"adapter {adapter.name} cannot be read: {error!r}")


def missing_adapters(parts: Sequence[SchedulerAdapters]) -> list[Adapter]:
    """Return the adapters of waiting requests that are in no slot, the most urgent first; the schedulers take turns."""
    turns = zip_longest(*(part.missing() for part in parts))
    return list(dict.fromkeys(adapter for turn in turns for adapter in turn if adapter is not None))


def adapter_loads(plan: StepPlan | ShardPlans) -> list[AdapterLoad]:
    """Return the slots whose content changes before the step, or before the step of any shard."""
    plans = [plan] if isinstance(plan, StepPlan) else plan
    return [load for shard_plan in plans if shard_plan is not None for load in shard_plan.adapter_loads]


class AdapterScheduler(Protocol):
    """A scheduler of requests with adapters: of one copy of the model, or of several that share the slots."""

    def fail(self, request_ids: Iterable[str], error: RequestError) -> list[EngineOutput]:
        """End requests that cannot run on. Returns their outputs, which have the error."""
        ...


class AdapterLoader:
    """Brings the adapters of waiting requests to host memory, and those that a plan names to slots."""

    def __init__(
        self,
        backend: LoraBackend,
        scheduler: AdapterScheduler,
        parts: Sequence[SchedulerAdapters],
        store: AdapterStore,
    ) -> None:
        """`parts`: the scheduler's, or those of its shards, which share the slots; not empty."""
        self._backend = backend
        self._scheduler = scheduler
        self._parts = parts
        self._store = store
        self._slots = parts[0].slots
        self._slots.ready = store.loaded
        self._known: set[Adapter] = set()  # adapters that `load_now` read

    def update(self) -> list[EngineOutput]:
        """Before steps are planned: take in what was read, read what waiting requests need next.

        Returns the outputs of requests whose adapter could not be read.
        """
        outputs: list[EngineOutput] = []
        if self._store.is_reading:
            for adapter, error in self._store.collect():
                waiting = [request_id for part in self._parts for request_id in part.queue.of(adapter)]
                outputs += self._scheduler.fail(waiting, error)
        if missing := missing_adapters(self._parts):
            self._store.want(missing)
        return outputs

    def load_now(self, adapter: Adapter) -> None:
        """Read an adapter to host memory in this thread, once. Raises RequestError if it cannot be read."""
        if adapter not in self._known:
            self._store.load_now(adapter)
            self._known.add(adapter)

    def fill_slots(self, plan: StepPlan | ShardPlans) -> None:
        """Hand the weights that a plan of the scheduler needs to the backend, before it executes the plan."""
        for load in adapter_loads(plan):
            self._backend.load_adapter(load.slot, self._store.take(load.adapter))

    def load(self, adapter: Adapter, done: Done) -> None:
        """Read an adapter to host memory; `done` is called at once, or by `update`, with the error if there is one."""
        if adapter in self._slots:
            done(None)
        else:
            self._store.load(adapter, done)

    def remove(self, number: int) -> None:
        """Forget adapters with that number. Running requests keep theirs; waiting ones have it read again."""
        for adapter in [known for known in (*self._slots.resident, *self._store.loaded) if known.number == number]:
            self._slots.drop(adapter)
            self._store.drop(adapter)

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read."""
        return self._store.is_reading

    def wait(self) -> None:
        """Wait briefly for an adapter that is being read."""
        self._store.wait()
