"""The step loop over several shards of the strict fake backend: assignment of requests, statistics, integrity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeShards, full_layout, scrambled

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.data_parallel import EngineShard, ShardedScheduler, sharded_core
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.lora.store import adapter_loads
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.errors import ConfigError, RequestError


def core(shards: int = 3, **settings) -> EngineCore:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    backend = FakeShards(full_layout(), shards, num_blocks=40, next_token=scrambled)
    return sharded_core(backend, backend.layout, Limits(**(defaults | settings)), (40,), shards)


def request(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=max_tokens)


def loads(engine: EngineCore) -> list[int]:
    return [shard.scheduler.num_unfinished for shard in engine._scheduler.shards]


def drain(engine: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
        engine.check_integrity()
    return outputs


def test_requests_are_spread_evenly() -> None:
    engine = core()
    for number in range(7):
        engine.add_request(request(str(number), [number + 1] * 5))
    assert sorted(loads(engine)) == [2, 2, 3]
    assert {output.request_id for output in drain(engine)} == set(map(str, range(7)))
    assert loads(engine) == [0, 0, 0]


def test_prefix_affinity_yields_to_load() -> None:
    engine = core()
    shared = [9] * 16
    for number in range(2):
        engine.add_request(request(f"other {number}", [number + 1] * 16))
    engine.add_request(request("first", shared))
    drain(engine)
    homes = []
    for number in range(3):
        engine.add_request(request(str(number), [*shared, number]))
        homes.append(loads(engine))
    assert homes == [[0, 0, 1], [0, 0, 2], [1, 0, 2]]
    cached = {output.request_id: output.num_cached_tokens for output in drain(engine)}
    assert cached == {"0": 16, "1": 16, "2": 0}
    assert engine.reset_prefix_cache()
    engine.add_request(request("again", shared))
    assert loads(engine) == [1, 0, 0]


def test_an_idle_shard_has_no_plan_while_another_works() -> None:
    engine = core(shards=2)
    engine.add_request(request("a", [1, 2, 3]))
    assert len(drain(engine)) == 4
    assert [len(backend.plans) for backend in engine._execute.__self__.shards] == [4, 0]
    assert engine.step().outputs == []


def test_statistics_sum_all_shards() -> None:
    engine = core(shards=2, async_scheduling=False)
    for name, prompt in (("a", [1] * 9), ("b", [2] * 5)):
        engine.add_request(request(name, prompt))
    stats = engine.step().stats
    assert (stats.running, stats.waiting, stats.last_step_tokens) == (2, 0, 9 + 5 + 2)
    assert [(each.running, each.last_step_tokens) for each in stats.replicas] == [(1, 9 + 1), (1, 5 + 1)]
    assert (stats.kv_blocks_used, stats.kv_blocks_total, stats.prefix_queries) == (3 + 2, 78, 14)
    assert engine.stats.running == 2


def test_the_first_output_names_the_replica() -> None:
    engine = core(shards=2, async_scheduling=False)
    for name in "ab":
        engine.add_request(request(name, [ord(name)] * 5))
    assert {output.request_id: output.replica for output in engine.step().outputs} == {"a": 0, "b": 1}


def test_abort_reaches_the_requests_shard() -> None:
    engine = core(shards=2)
    for name in "abc":
        engine.add_request(request(name, [ord(name)] * 5, max_tokens=50))
    engine.step()
    engine.abort(["b", "unknown"])
    assert sorted(loads(engine)) == [0, 2]
    assert {output.request_id for output in drain(engine)} == {"a", "c"}


def test_a_refused_request_is_not_assigned_to_a_shard() -> None:
    engine = core(shards=2)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.add_request(request("a", []))
    assert not engine.has_work
    engine.add_request(request("a", [1, 2]))
    with pytest.raises(RequestError, match="request a is already in the engine"):
        engine.add_request(request("a", [3, 4]))
    assert loads(engine) == [1, 0]
    backend = FakeShards(full_layout(8), 2)
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4)
    with pytest.raises(ConfigError, match="--block-size"):
        sharded_core(backend, full_layout(8), limits, (16,), 2)


def test_check_integrity_detects_a_lost_request() -> None:
    engine = core(shards=2)
    engine.add_request(request("a", [1, 2]))
    engine._scheduler.shards[0].scheduler.abort(["a"])
    with pytest.raises(RuntimeError, match="the shards have 0 requests, 1 were assigned to them"):
        engine.check_integrity()


def test_shards_share_the_slots_of_adapters() -> None:
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_loras=2)
    managers = [KvManager(full_layout(), (40,), max_num_seqs=4, max_model_len=64, max_step_tokens=16) for _ in range(2)]
    sharded = ShardedScheduler(tuple(EngineShard(kv, Scheduler(limits, kv)) for kv in managers))
    adapters = [Adapter(number=number, name=f"a{number}", path=f"/{number}") for number in (1, 2)]
    (slots,) = {part.slots for part in sharded.adapters}
    slots.ready = set(adapters)
    for adapter in adapters:
        sharded.add(replace(request(adapter.name, [1, 2]), adapter=adapter))
    plans = sharded.schedule()
    assert plans is not None
    assert [None if plan is None else plan.num_seqs for plan in plans] == [1, 1]
    assert [load.slot for load in adapter_loads(plans)] == [0, 1]
    assert slots.references == [1, 1]
    sharded.check_integrity()


def test_a_cache_key_has_a_shard_until_that_has_too_many_requests() -> None:
    homes = set()
    for key in map(str, range(12)):
        engine = core()
        for number in range(3):
            engine.add_request(replace(request(str(number), [number + 1] * 16), cache_key=key))
        assert sorted(loads(engine)) == [0, 1, 2], "the third is one too many"
        homes.add(loads(engine).index(2))
    assert homes == {0, 1, 2}
