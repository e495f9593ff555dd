"""Adapters in the engine: which request may run, which slot it gets, exact references, the host cache."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from fakes import FakeBackend, FakePending, full_layout, scrambled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.lora import slots as slots_module
from pagoda.common.engine.lora import store as store_module
from pagoda.common.engine.lora.adapter import NO_ADAPTER, Adapter, AdapterLoad
from pagoda.common.engine.lora.slots import AdapterQueue, AdapterSlots
from pagoda.common.engine.lora.store import AdapterStore
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import FcfsQueue, Request
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import RowStart, StepPlan
from pagoda.common.errors import RequestError
from pagoda.common.weights.lora.weights import AdapterWeights


def adapter(number: int, version: int = 0) -> Adapter:
    return Adapter(number=number, name=f"a{number}", path=f"/{number}", version=version)


def request(name: str, tokens: list[int], own: Adapter | None, max_tokens: int = 8, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        rules=SamplingRules(),
        max_tokens=max_tokens,
        adapter=own,
        priority=priority,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Known(AdapterWeights):
    """Weights that say whose they are."""

    number: int = 0


def read(each: Adapter) -> AdapterWeights:
    return Known(8, {}, number=each.number + 1000 * each.version)


class AdapterBackend(FakeBackend):
    """Tokens, keys and values depend on the adapter in the sequence's slot when the step runs."""

    def __init__(self, slots: int, **settings) -> None:
        super().__init__(full_layout(), next_token=scrambled, **settings)
        self.held = [0] * slots
        self.filled: list[int] = []
        self.announced: list[AdapterLoad] = []

    def adaptable(self):
        return {}

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        assert isinstance(weights, Known)
        self.held[slot] = weights.number
        self.filled.append(slot)

    def execute(self, plan: StepPlan) -> FakePending:
        assert [load.slot for load in plan.adapter_loads] == self.filled, "slots are filled before the step, once"
        self.announced += plan.adapter_loads
        self.filled = []
        slots = np.full(plan.num_seqs, NO_ADAPTER) if plan.adapter_slots is None else plan.adapter_slots
        assert plan.adapter_slots is None or (plan.adapter_slots.dtype == np.int32 and (slots >= 0).any())
        numbers = [0 if slot == NO_ADAPTER else self.held[slot] for slot in slots.tolist()]
        self.number_of = dict(zip(plan.rows.tolist(), numbers))
        return super().execute(plan)

    def _start(self, start: RowStart) -> None:
        super()._start(start)
        self.rows[start.row].root = 7 + self.number_of[start.row]

    def _sample(self, plan, index, masks):
        number = self.number_of[int(plan.rows[index])]
        assert self.rows[int(plan.rows[index])].root == 7 + number, "a slot changed under its sequence"
        self.next_token = lambda history: scrambled([number, *history])
        return super()._sample(plan, index, masks)


def engine(
    slots: int, host: int = 0, *, rows: int = 4, blocks: int = 24, **limits
) -> tuple[EngineCore, AdapterBackend]:
    backend = AdapterBackend(slots, num_blocks=blocks)
    given = {"max_model_len": 48, "max_num_batched_tokens": 16, "max_num_seqs": rows, "block_size": 4, **limits}
    store = AdapterStore(read, host or slots)
    return generation_core(
        backend, backend.layout, Limits(**given, max_loras=slots), backend.num_blocks, store=store
    ), backend


class Wrapped:
    """A plug-in scheduler that has ours inside."""

    def __init__(self, *built: Any) -> None:
        self.inner = Scheduler(*built)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_scheduler_that_wraps_ours_has_adapters() -> None:
    backend = AdapterBackend(2, num_blocks=24)
    limits = Limits(max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_loras=2)
    core = generation_core(
        backend,
        backend.layout,
        limits,
        backend.num_blocks,
        store=AdapterStore(read, 2),
        make_scheduler=lambda limits, kv, *_: cast(Scheduler, Wrapped(limits, kv)),
    )
    core.add_request(request("a", [1, 2, 3], adapter(1)))
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            tokens += output.new_token_ids
    assert tokens == alone(request("a", [1, 2, 3], adapter(1)))


def alone(each: EngineRequest) -> list[int]:
    history, answer = list(each.prompt_token_ids), []
    number = 0 if each.adapter is None else each.adapter.number + 1000 * each.adapter.version
    while len(answer) < each.max_tokens:
        answer.append(scrambled([number, *history]))
        history.append(answer[-1])
    return answer


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # adapter; 0: none
        st.integers(0, 1),  # version
        st.sampled_from([1, 4, 9, 13, 17]),  # tokens of the prompt
        st.integers(1, 14),  # tokens to generate
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # steps before it comes
        st.sampled_from([None, None, None, 2, 9]),  # steps after which it is aborted
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    traffic=REQUESTS,
    slots=st.integers(1, 4),
    more=st.integers(0, 3),
    rows=st.sampled_from([1, 2, 4, 7]),
    blocks=st.sampled_from([11, 14, 20, 40]),
    policy=st.sampled_from(["fcfs", "priority"]),
    ahead=st.booleans(),
    caching=st.booleans(),
    patience=st.sampled_from([0, 2, 256]),
)
def test_any_traffic_gets_the_answers_of_each_request_alone(
    traffic, slots, more, rows, blocks, policy, ahead, caching, patience
):
    """Whatever waits, is preempted, aborted or replaced: references stay exact, and idle engines hold none."""
    before, slots_module.MOST_OVERTAKEN = slots_module.MOST_OVERTAKEN, patience
    try:
        core, backend = engine(
            slots, slots + more, rows=rows, blocks=blocks, policy=policy, async_scheduling=ahead, prefix_caching=caching
        )
        waiting, outputs, aborts = list(enumerate(traffic)), {}, {}
        expected: dict[str, list[int]] = {}
        for step in range(100_000):
            for index, (number, version, length, count, priority, start, stop) in list(waiting):
                if start <= step:
                    waiting.remove((index, (number, version, length, count, priority, start, stop)))
                    own = adapter(number, version) if number else None
                    each = request(f"r{index}", [10 + number % 2] * length, own, count, priority)
                    core.add_request(each)
                    expected[each.request_id], outputs[each.request_id] = alone(each), []
                    if stop is not None:
                        aborts[each.request_id] = step + stop
            for name in [name for name, at in aborts.items() if at <= step]:
                core.abort([name])
                del aborts[name]
                if len(outputs[name]) < len(expected[name]):
                    expected[name] = outputs[name][:]
            if not core.has_work:
                if not waiting:
                    break
                continue
            for output in core.step().outputs:
                outputs[output.request_id] += output.new_token_ids
            core.check_integrity()
        assert outputs == expected
        scheduler = core._scheduler
        assert isinstance(scheduler, Scheduler)
        assert scheduler.adapters is not None
        assert scheduler.adapters.slots.references == [0] * slots
        assert len({load.slot for load in backend.announced}) <= slots
    finally:
        slots_module.MOST_OVERTAKEN = before


def waiting(queue: AdapterQueue, name: str, number: int, own: Adapter | None) -> Request:
    each = Request.of(request(name, [1], own), limit=9, rank=(float(number),))
    queue.push(each)
    return each


def test_a_request_waits_for_a_slot_and_later_ones_pass() -> None:
    slots = AdapterSlots(1, {adapter(1), adapter(2)})
    queue = AdapterQueue(slots, FcfsQueue)
    for number, own in enumerate([adapter(1), adapter(2), None, adapter(1), adapter(3)]):
        waiting(queue, f"r{number}", number, own)
    order = []
    for _ in range(3):
        each = queue.peek()
        order.append(each.request_id)
        queue.pop()
        if each.adapter is not None:
            slots.acquire(each.adapter)
    assert order == ["r0", "r2", "r3"]
    with pytest.raises(IndexError):
        queue.peek()
    assert queue.adapters() == [adapter(2), adapter(3)]
    assert slots.take_loads() == (AdapterLoad(0, adapter(1)),)
    slots.release(adapter(1))
    slots.release(adapter(1))
    assert queue.peek().request_id == "r1"
    assert slots.acquire(adapter(2)) == 0
    assert slots.take_loads() == (AdapterLoad(0, adapter(2)),)
    assert adapter(1) not in slots
    assert len(queue) == 2


def test_a_request_is_not_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot with the fewest references takes no more, until it is free."""
    monkeypatch.setattr(slots_module, "MOST_OVERTAKEN", 3)
    slots = AdapterSlots(2, {adapter(1), adapter(2), adapter(3)})
    queue = AdapterQueue(slots, FcfsQueue)
    for own in (adapter(1), adapter(1), adapter(2)):
        slots.acquire(own)
    waiting(queue, "blocked", 0, adapter(3))
    taken = []
    for number in range(1, 9):
        waiting(queue, f"r{number}", number, adapter(1 + number % 2))
    for _ in range(5):
        each = queue.peek()
        queue.pop()
        assert each.adapter is not None
        slots.acquire(each.adapter)
        taken.append(each.adapter.number)
    assert taken == [2, 1, 2, 2, 2]
    for _ in range(3):
        with pytest.raises(IndexError):
            queue.peek()
        slots.release(adapter(1))
    assert queue.peek().request_id == "blocked"


def test_the_least_recently_used_slot_is_replaced() -> None:
    slots = AdapterSlots(2, {adapter(number) for number in range(4)})
    for number in (1, 2, 1):
        slots.acquire(adapter(number))
        slots.release(adapter(number))
    assert slots.acquire(adapter(3)) == 1
    assert set(slots.resident) == {adapter(1), adapter(3)}
    slots.drop(adapter(1))
    slots.drop(adapter(3))
    assert set(slots.resident) == {adapter(3)}
    assert slots.acquire(adapter(2)) == 0
    with pytest.raises(RuntimeError, match="every slot"):
        slots.acquire(adapter(1))
    slots.release(adapter(2))
    with pytest.raises(RuntimeError, match="no references"):
        slots.release(adapter(2))


def test_prefixes_are_not_shared_by_adapters_or_versions() -> None:
    core, _ = engine(2)
    tokens = [5] * 13
    cached = []
    for index, own in enumerate([None, adapter(1), adapter(2), adapter(1, 1), adapter(1), None]):
        core.add_request(request(f"r{index}", tokens, own, 1))
        while core.has_work:
            cached += [output.num_cached_tokens for output in core.step().outputs]
    assert cached == [0, 0, 0, 0, 12, 12]


def test_an_adapter_that_cannot_be_read_fails_its_requests_only() -> None:
    def broken(each: Adapter) -> AdapterWeights:
        if each.number == 2:
            raise OSError("no such file")
        return read(each)

    backend = AdapterBackend(2)
    limits = Limits(max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_loras=2)
    store = AdapterStore(broken, 2)
    core = generation_core(backend, backend.layout, limits, backend.num_blocks, store=store)
    for index, own in enumerate([adapter(1), adapter(2), None, adapter(2)]):
        core.add_request(request(f"r{index}", [3], own, 3))
    outputs: dict[str, list] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    for name in ("r1", "r3"):
        assert [(each.finish_reason, each.error) for each in outputs[name]] == [
            ("error", ("lora_request", "adapter a2: no such file"))
        ]
    assert outputs["r0"][-1].finish_reason == outputs["r2"][-1].finish_reason == "length"
    replies: list[RequestError | None] = []
    core.load_adapter(adapter(2), replies.append)
    core.load_adapter(adapter(3), replies.append)
    while core.has_work:
        core.step()
    assert [None if each is None else str(each) for each in replies] == ["adapter a2: no such file", None]
    with pytest.raises(RequestError, match="no such file"):
        core.load_adapter_now(adapter(2))


def test_running_requests_go_on_while_an_adapter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk delays the requests of its adapter, no others."""
    allowed = threading.Event()

    def slow(each: Adapter) -> AdapterWeights:
        assert allowed.wait(60)
        return read(each)

    backend = AdapterBackend(1)
    limits = Limits(max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_loras=1)
    core = generation_core(backend, backend.layout, limits, backend.num_blocks, store=AdapterStore(slow, 1))
    core.add_request(request("slow", [3], adapter(1), 3))
    core.add_request(request("plain", [3], None, 20))
    done: list[str] = []
    while "plain" not in done:
        done += [output.request_id for output in core.step().outputs if output.finish_reason]
    stats = core.stats
    assert (stats.waiting_adapters, stats.running_adapters) == (("a1",), ())
    timeouts: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "wait", lambda futures, timeout, until: timeouts.append(timeout))
        core.step()
    assert [0 < seconds < 1 for seconds in timeouts] == [True], "an idle step waits briefly: commands are read then"
    allowed.set()
    while core.has_work:
        done += [output.request_id for output in core.step().outputs if output.finish_reason]
    assert done == ["plain", "slow"]


def test_the_host_cache_keeps_what_is_wanted_next() -> None:
    reads: list[int] = []

    def counted(each: Adapter) -> AdapterWeights:
        reads.append(each.number)
        return read(each)

    store = AdapterStore(counted, 2)
    for wanted in ([1, 2], [2, 3, 4], [3, 2], [1]):
        store.want([adapter(number) for number in wanted])
        while store.is_reading:
            store.wait()
            assert store.collect() == []
        assert {adapter(number) for number in wanted[:2]} <= store.loaded.keys()
        assert len(store.loaded) <= 2
    assert reads == [1, 2, 3, 1]
    store.drop(adapter(1))
    assert adapter(1) not in store.loaded
    store.close()


def test_requests_with_adapters_need_slots() -> None:
    backend = AdapterBackend(1)
    limits = Limits(max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4, block_size=4)
    core = generation_core(backend, backend.layout, limits, backend.num_blocks)
    with pytest.raises(RequestError, match="--enable-lora"):
        core.add_request(request("r", [1], adapter(1)))
    with pytest.raises(RequestError, match="--enable-lora"):
        core.load_adapter_now(adapter(1))


def test_200_adapters_over_8_slots() -> None:
    numbers = random.Random(3)
    core, backend = engine(8, 16, rows=16, blocks=200)
    requests = [
        request(f"r{index}", [numbers.randrange(5) for _ in range(6)], adapter(1 + index % 200), 6)
        for index in range(600)
    ]
    for each in requests:
        core.add_request(each)
    outputs: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert outputs == {each.request_id: alone(each) for each in requests}
    assert len(backend.announced) >= 200
    assert replace(adapter(1), version=1) != adapter(1)
