"""Which adapter is in which slot of the device, and which waiting request may run next.

A running request holds a reference to the slot of its adapter. A slot without references keeps its adapter until
another one needs it; the least recently used goes first. A waiting request whose adapter has no slot lets requests of
other adapters pass, but not for ever: see `MOST_OVERTAKEN`. Uses no device and no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.engine.lora.adapter import NO_ADAPTER, Adapter, AdapterLoad
from pagoda.common.engine.scheduling.request import NO_ROW, Request, RunningBatch, SchedulerPart, WaitingQueue
from pagoda.common.engine.steps.contract import Int32

MOST_OVERTAKEN: Final = 256
"""Later requests that may run before one that waits for a slot. Then the slot with the fewest references takes no
further requests, until it has none and is the waiting adapter's."""


@dataclass(frozen=True, slots=True)
class SlotsState:
    """The state of AdapterSlots but for the references, which follow from the running requests."""

    slots: tuple[tuple[Adapter, int], ...]  # the least recently used adapter first
    loads: tuple[AdapterLoad, ...]  # slots whose content changes before the next step


class AdapterSlots:
    """Slots and their references. `ready`: adapters whose weights are in host memory, to be copied to a slot."""

    def __init__(self, count: int, ready: Container[Adapter]) -> None:
        self.ready = ready
        self.references = [0] * count  # running requests that use each slot
        self._adapters: list[Adapter | None] = [None] * count
        self._slots: dict[Adapter, int] = {}  # least recently used first
        self._loads: list[AdapterLoad] = []
        self.draining: dict[AdapterQueue, Adapter] = {}  # adapters that take no further requests, by who waits for it

    @property
    def resident(self) -> Iterable[Adapter]:
        """The adapters in slots."""
        return self._slots.keys()

    @property
    def running(self) -> list[Adapter]:
        """The adapters of running requests."""
        return [adapter for adapter, slot in self._slots.items() if self.references[slot]]

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._slots

    def has_room(self) -> bool:
        """Whether a slot has no references."""
        return 0 in self.references

    def acquire(self, adapter: Adapter) -> int:
        """Return the adapter's slot with one more reference; first give it one without. Raises RuntimeError if full."""
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._replaceable()
            if (before := self._adapters[slot]) is not None:
                del self._slots[before]
            self._adapters[slot] = adapter
            self._loads = [load for load in self._loads if load.slot != slot] + [AdapterLoad(slot, adapter)]
        self._slots[adapter] = slot
        self.references[slot] += 1
        return slot

    def release(self, adapter: Adapter) -> None:
        """Drop a reference to the adapter's slot."""
        slot = self._slots[adapter]
        if not self.references[slot]:
            raise RuntimeError(f"slot {slot} of adapter {adapter.name} has no references")
        self.references[slot] -= 1

    def drop(self, adapter: Adapter) -> None:
        """Forget an adapter without references, so that its slot is the next to be used; an unknown one is skipped."""
        slot = self._slots.get(adapter)
        if slot is not None and not self.references[slot]:
            del self._slots[adapter]
            self._adapters[slot] = None
            self._loads = [load for load in self._loads if load.slot != slot]

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the slots whose content changes before the next step, once."""
        loads = self._loads
        self._loads = []
        return tuple(loads)

    def fewest_references(self) -> Adapter | None:
        """Return the adapter with the fewest references, None if a slot is empty."""
        if None in self._adapters:
            return None
        return self._adapters[self.references.index(min(self.references))]

    def state(self) -> SlotsState:
        """Return a copy of the state."""
        return SlotsState(tuple(self._slots.items()), tuple(self._loads))

    def restore(self, state: SlotsState) -> None:
        """Replace the state; no slot has references then."""
        self.references = [0] * len(self.references)
        self._adapters = [None] * len(self.references)
        self._slots = dict(state.slots)
        for adapter, slot in state.slots:
            self._adapters[slot] = adapter
        self._loads = list(state.loads)

    def slot_of(self, adapter: Adapter) -> int:
        """Return the slot of an adapter that has one."""
        return self._slots[adapter]

    def _replaceable(self) -> int:
        if None in self._adapters:
            return self._adapters.index(None)
        for slot in self._slots.values():
            if not self.references[slot]:
                return slot
        raise RuntimeError("every slot for adapters has references")

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError unless the references are those of the running requests."""
        expected = [0] * len(self.references)
        for request in running:
            if request.adapter is not None:
                expected[self._slots[request.adapter]] += 1
        if expected != self.references:
            raise RuntimeError(f"slots have {self.references} references, running requests hold {expected}")
        held = {slot: adapter for adapter, slot in self._slots.items()}
        if held != {slot: adapter for slot, adapter in enumerate(self._adapters) if adapter is not None}:
            raise RuntimeError("adapters and slots differ")


class AdapterQueue(WaitingQueue):
    """A queue per adapter, and one for requests without. `make`: returns an empty queue.

    The next request is the first by rank among those that may run now.
    """

    def __init__(self, slots: AdapterSlots, make: Callable[[], WaitingQueue]) -> None:
        self.slots = slots
        self._make = make
        self._queues: dict[Adapter | None, WaitingQueue] = {}
        self._adapter_of: dict[str, Adapter | None] = {}  # request -> its adapter
        self._blocked: Request | None = None  # the first by rank that waits for a slot
        self._overtaken = 0  # requests that ran before it since
        self._next: Request | None = None  # the request that `peek` returned last

    def push(self, request: Request) -> None:
        self._next = None
        self._queue_of(request).push(request)

    def push_front(self, request: Request) -> None:
        self._next = None
        self._queue_of(request).push_front(request)

    def _queue_of(self, request: Request) -> WaitingQueue:
        self._adapter_of[request.request_id] = request.adapter
        return self._queues.setdefault(request.adapter, self._make())

    def peek(self) -> Request:
        """Return the next request that may run. Raises IndexError if there is none."""
        self._next = self._first()
        if self._next is None:
            raise IndexError("no waiting request may run")
        return self._next

    def _first(self) -> Request | None:
        has_room = self.slots.has_room()
        self._drain()
        draining = self.slots.draining.values()
        first: Request | None = None
        blocked: Request | None = None
        for adapter, queue in self._queues.items():
            head = queue.peek()
            resident = adapter is None or adapter in self.slots
            if not (resident or adapter in self.slots.ready):
                continue
            if has_room or adapter is None or (resident and adapter not in draining):
                first = _earlier(first, head)
            elif not resident:
                blocked = _earlier(blocked, head)
        if blocked is not self._blocked:
            self._block(blocked)
        return first

    def _block(self, request: Request | None) -> None:
        """Count from now on the requests that overtake this one."""
        self._blocked = request
        self._overtaken = 0
        self.slots.draining.pop(self, None)

    def _drain(self) -> None:
        """If the blocked request has waited for too long, let the slot that is free soonest take no more requests."""
        if self._overtaken >= MOST_OVERTAKEN and (adapter := self.slots.fewest_references()) is not None:
            self.slots.draining[self] = adapter
        else:
            self.slots.draining.pop(self, None)

    def pop(self) -> Request:
        """Remove and return the request that `peek` returned last."""
        request = self._next or self.peek()
        if self._blocked is not None and self._blocked.rank < request.rank:
            self._overtaken += 1
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> Request | None:
        if request_id not in self._adapter_of:
            return None
        self._next, adapter = None, self._adapter_of.pop(request_id)
        if self._blocked is not None and self._blocked.request_id == request_id:
            self._block(None)
        queue = self._queues[adapter]
        request = queue.remove(request_id)
        if not len(queue):
            del self._queues[adapter]
        return request

    @property
    def blocked(self) -> tuple[str | None, int]:
        """The request that waits for a slot while others pass, and how many have."""
        return None if self._blocked is None else self._blocked.request_id, self._overtaken

    def restore_blocked(self, request: Request | None, overtaken: int) -> None:
        """Replace what `blocked` returns."""
        self._blocked = request
        self._overtaken = overtaken

    def of(self, adapter: Adapter) -> list[str]:
        """Return the ids of the waiting requests of an adapter."""
        return [request_id for request_id, waiting_for in self._adapter_of.items() if waiting_for == adapter]

    def adapters(self) -> list[Adapter]:
        """Return the adapters of waiting requests, by the rank of the first request of each."""
        heads = [(queue.peek().rank, adapter) for adapter, queue in self._queues.items() if adapter is not None]
        return [adapter for _, adapter in sorted(heads, key=lambda head: head[0])]

    def __len__(self) -> int:
        return len(self._adapter_of)


@dataclass(frozen=True, slots=True)
class AdaptersState:
    """The state of SchedulerAdapters but for what follows from the requests."""

    slots: SlotsState
    blocked: str | None  # the request that waits for a slot while others pass
    overtaken: int  # how many have passed it


class SchedulerAdapters(SchedulerPart[AdaptersState]):
    """The LoRA adapters of one scheduler's requests. `make`: returns an empty queue; see AdapterQueue."""

    needs = "adapter"

    def __init__(self, slots: AdapterSlots, batch: RunningBatch, make: Callable[[], WaitingQueue]) -> None:
        self.slots = slots
        self.queue = AdapterQueue(slots, make)
        self.num_requests = 0  # unfinished requests with adapters
        self._batch = batch
        self._is_shared = False

    def share(self, slots: AdapterSlots) -> None:
        """Use slots that other schedulers use, too. Before the first request."""
        if len(self.queue) or self.num_requests:
            raise RuntimeError("slots for adapters are shared before the first request")
        self.slots = slots
        self.queue.slots = slots
        self._is_shared = True

    def added(self, request: Request) -> None:
        self.num_requests += 1

    def started(self, request: Request) -> None:
        if request.adapter is not None:
            self._batch.adapter_slot[request.row] = self.slots.acquire(request.adapter)

    def stopped(self, request: Request) -> None:
        if request.adapter is not None:
            self._batch.adapter_slot[request.row] = NO_ADAPTER
            self.slots.release(request.adapter)

    def finished(self, request: Request) -> None:
        self.num_requests -= 1

    def missing(self) -> list[Adapter]:
        """Return the adapters of waiting requests that are in no slot, the most urgent first."""
        if not self.num_requests:
            return []
        return [adapter for adapter in self.queue.adapters() if adapter not in self.slots]

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the adapters of running and of waiting requests."""
        if not self.num_requests:
            return (), ()
        waiting = self.queue.adapters()
        return tuple(adapter.name for adapter in self.slots.running), tuple(adapter.name for adapter in waiting)

    def slots_of(self, rows: Int32) -> Int32 | None:
        """Return the slot of each of `rows`, or NO_ADAPTER; None if none has an adapter."""
        if not self.num_requests:
            return None
        slots = self._batch.adapter_slot[rows]
        return slots if (slots != NO_ADAPTER).any() else None

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError unless the slots' references are those of the running requests; not for shared slots."""
        if not self._is_shared:
            self.slots.check_integrity(running)

    def state(self) -> AdaptersState:
        blocked, overtaken = self.queue.blocked
        return AdaptersState(self.slots.state(), blocked, overtaken)

    def restore(self, state: AdaptersState, requests: Sequence[Request]) -> None:
        self.num_requests = len(requests)
        self.slots.restore(state.slots)
        blocked = None
        for request in requests:
            if request.request_id == state.blocked:
                blocked = request
            if request.row != NO_ROW and request.adapter is not None:
                slot = self.slots.slot_of(request.adapter)
                self.slots.references[slot] += 1
                self._batch.adapter_slot[request.row] = slot
        self.queue.restore_blocked(blocked, state.overtaken)


def _earlier(one: Request | None, other: Request) -> Request:
    return other if one is None or other.rank < one.rank else one
