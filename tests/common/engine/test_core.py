"""The step loop over the strict fake backend."""

from __future__ import annotations

import pytest
from fakes import FakeBackend, full_layout, hybrid_layout, scrambled
from support.engines.engine_runs import drain, new_tokens

from pagoda.common.config.engine import Limits
from pagoda.common.engine import core as core_module
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError, RequestError


def limits(**settings) -> Limits:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    return Limits(**(defaults | settings))


def core(backend: FakeBackend, **settings) -> EngineCore:
    return generation_core(backend, backend.layout, limits(**settings), backend.num_blocks)


def request(name: str, prompt: list[int], max_tokens: int = 8, **settings) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **({"rules": SamplingRules()} | settings)
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_many_requests_of_many_sizes_all_end(ahead):
    engine = core(FakeBackend(hybrid_layout(), num_blocks=24), async_scheduling=ahead)
    for number in range(12):
        engine.add_request(request(str(number), [100] * (1 + 3 * number), max_tokens=1 + number))
    outputs = drain(engine)
    assert {name: new_tokens(news) for name, news in outputs.items()} == {
        str(number): [101 + step for step in range(1 + number)] for number in range(12)
    }
    assert all(news[-1].finish_reason == "length" for news in outputs.values())
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 0, 0, 23)
    assert stats.kv_usage == 0.0


def test_the_next_step_starts_before_the_result_of_the_first():
    backend = FakeBackend(full_layout())
    engine = core(backend)
    engine.add_request(request("a", [1, 2, 3]))
    assert new_tokens(engine.step().outputs) == [4]
    assert len(backend.plans) == 2
    backend = FakeBackend(full_layout())
    engine = core(backend, async_scheduling=False)
    engine.add_request(request("a", [1, 2, 3]))
    assert new_tokens(engine.step().outputs) == [4]
    assert len(backend.plans) == 1


def test_a_step_without_work_is_empty():
    engine = core(FakeBackend(full_layout()))
    assert not engine.has_work
    assert engine.step().outputs == []


def test_stats_count_tokens_and_steps():
    engine = core(FakeBackend(full_layout()), async_scheduling=False)
    engine.add_request(request("a", [1] * 9))
    stats = engine.step().stats
    assert (stats.steps, stats.last_step_tokens, stats.running, stats.kv_blocks_used) == (1, 10, 1, 3), (
        "9 of the prompt, and one generated"
    )
    assert engine.step().stats.last_step_tokens == 1


def test_an_aborted_request_says_no_more():
    engine = core(FakeBackend(full_layout()))
    engine.add_request(request("a", [1, 2, 3], 40))
    engine.add_request(request("b", [1, 2, 3], 4))
    engine.step()
    engine.abort(["a"])
    outputs = drain(engine)
    assert "a" not in outputs
    assert len(outputs["b"]) == 3


def test_the_engine_serves_on_after_a_refusal():
    engine = core(FakeBackend(full_layout()))
    with pytest.raises(RequestError):
        engine.add_request(request("a", []))
    engine.add_request(request("a", [1]))
    assert len(new_tokens(drain(engine)["a"])) == 8


def test_logprobs_arrive_per_token_and_prompt_logprobs_once():
    engine = core(FakeBackend(full_layout()), max_num_batched_tokens=4)
    engine.add_request(request("b", [3, 4, 5, 6, 7, 8, 9], 3))
    drain(engine)
    rules = SamplingRules(logprobs=2, prompt_logprobs=0)
    engine.add_request(request("a", [3, 4, 5, 6, 7, 8, 9], 3, rules=rules))
    outputs = drain(engine)["a"]
    assert [position.token_ids for output in outputs for position in output.logprobs] == [
        [10, 11, 12],
        [11, 12, 13],
        [12, 13, 14],
    ]
    assert [position.token_ids for position in outputs[0].prompt_logprobs] == [[4], [5], [6], [7], [8], [9]]
    assert [position.logprobs for position in outputs[0].prompt_logprobs] == [[-p] for p in range(1, 7)]
    assert outputs[1].prompt_logprobs is None
    assert outputs[0].num_cached_tokens == 0, "it computes every position"


def test_resetting_the_prefix_cache():
    engine = core(FakeBackend(full_layout()))

    def cached(name: str) -> int:
        engine.add_request(request(name, [1] * 9, 1))
        return drain(engine)[name][0].num_cached_tokens

    assert [cached("a"), cached("b")] == [0, 8]
    assert engine.reset_prefix_cache()
    assert cached("c") == 0


def test_the_cache_can_be_reset_under_running_requests():
    engine = core(FakeBackend(full_layout(), next_token=scrambled))
    engine.add_request(request("a", [1] * 9, 20))
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    engine.add_request(request("b", [1] * 9, 20))
    assert len(new_tokens(drain(engine)["b"])) == 20


@pytest.mark.parametrize("ahead", [False, True])
def test_weights_are_updated_in_an_idle_engine_only(ahead):
    backend = FakeBackend(full_layout())
    engine = core(backend, async_scheduling=ahead)
    engine.add_request(request("a", [1] * 9))
    engine.step()
    with pytest.raises(AssertionError, match="requests end first"):
        engine.update_weights(lambda: backend.update_weights([]))
    assert backend.weights == "loaded"
    drain(engine)
    engine.update_weights(lambda: backend.update_weights([]))
    assert backend.weights == "read 0"


@pytest.mark.parametrize("ahead", [False, True])
def test_suspended_requests_stand_still_and_continue_with_their_kv(ahead):
    backend = FakeBackend(full_layout())
    engine = core(backend, async_scheduling=ahead)
    engine.add_request(request("a", [1, 2, 3]))
    engine.add_request(request("b", [1, 2, 3], 40))
    before = [output for output in engine.step().outputs if output.request_id == "a"]
    engine.suspend()
    before += drain(engine).get("a", [])
    steps = len(backend.plans)
    engine.abort(["b"])
    engine.add_request(request("c", [9], 2))
    assert (engine.has_work, engine.has_requests) == (False, True)
    assert engine.step().outputs == []
    with pytest.raises(AssertionError, match="requests end first"):
        engine.update_weights(lambda: backend.update_weights([]))
    assert len(backend.plans) == steps
    assert engine.stats.kv_blocks_used > 0
    engine.resume()
    after = drain(engine)
    assert new_tokens(before + after["a"]) == list(range(4, 12))
    assert new_tokens(after["c"]) == [10, 11]
    assert "b" not in after


def test_an_error_of_the_device_reaches_the_caller():
    engine = core(FakeBackend(full_layout(), fail_at=2))
    engine.add_request(request("a", [1, 2, 3]))
    engine.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


def test_the_layout_and_the_limits_must_agree():
    with pytest.raises(ConfigError, match="--block-size"):
        generation_core(FakeBackend(full_layout(8)), full_layout(8), limits(), (16,))


def test_a_block_that_leaks_stops_the_engine_when_it_falls_idle():
    engine = core(FakeBackend(full_layout(), num_blocks=24))
    engine.add_request(request("a", [1, 2, 3]))
    engine.step()
    engine._kv_managers[0].pools[0].allocate()  # no request will ever free it
    with pytest.raises(RuntimeError, match="KV cache leak: the engine is idle, but 1 blocks are in use"):
        drain(engine)


def test_a_block_that_leaks_is_noticed_when_the_last_request_is_aborted():
    engine = core(FakeBackend(full_layout(), num_blocks=24), async_scheduling=False)
    engine.add_request(request("a", [1, 2, 3]))
    engine.step()
    engine._kv_managers[0].pools[0].allocate()
    with pytest.raises(RuntimeError, match="KV cache leak"):
        engine.abort(["a"])


def test_block_counts_are_checked_under_load(monkeypatch):
    monkeypatch.setattr(core_module, "CHECK_INTERVAL", 3)
    engine = core(FakeBackend(full_layout(), num_blocks=24))
    engine.add_request(request("a", [1, 2, 3], max_tokens=30))
    engine.step()
    engine._kv_managers[0].pools[0].num_free += 1
    engine.step()
    with pytest.raises(RuntimeError, match="KV cache accounting is broken"):
        engine.step()
