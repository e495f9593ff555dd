"""Where recurrent state is kept, and what a conversation of an agent finds in the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeBackend, scrambled, snapshots_every
from support.engines.engine_runs import AgentTrace, TraceRun, run_trace

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.borders import BorderRule, SequenceBorders
from pagoda.common.engine.kv_cache.spec import KvLayout, layout_of
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.mixers.caches import FullCache, StateCache

DEFAULTS = StateSnapshots()


def borders_of(rule: BorderRule, *, cached: int, matched: int, stable: int, known: int, until: int) -> list[int]:
    """All borders of a sequence up to `until` tokens."""
    borders = rule.of_sequence(cached=cached, matched=matched, stable=stable, known=known)
    positions = [cached]
    while positions[-1] < until:
        positions.append(rule.after(borders, positions[-1]))
    return positions[1:-1]


def test_the_end_of_the_prompt_and_of_its_answer() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=0), 16)
    assert borders_of(rule, cached=0, matched=0, stable=600, known=600, until=800) == [592, 640, 704, 768]


def test_the_end_of_the_stable_part_stands_in_for_that_of_the_prompt() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=0), 16)
    assert borders_of(rule, cached=0, matched=0, stable=576, known=600, until=641) == [576, 640]


def test_the_last_token_is_computed_in_any_case() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=0), 16)
    assert borders_of(rule, cached=0, matched=0, stable=608, known=608, until=640) == [592]


def test_the_junction_with_an_earlier_prompt() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=0), 16)
    assert borders_of(rule, cached=0, matched=320, stable=600, known=600, until=600) == [320, 592]


def test_an_interval() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=250), 16)  # in whole pages: 256
    assert borders_of(rule, cached=0, matched=0, stable=600, known=600, until=780) == [256, 512, 592, 640, 704, 768]


def test_none_is_close_to_the_cached_prefix() -> None:
    rule = BorderRule(DEFAULTS, 16)
    assert borders_of(rule, cached=576, matched=592, stable=620, known=630, until=700) == [640]
    assert borders_of(rule, cached=576, matched=640, stable=656, known=670, until=704) == [640, 656]
    assert borders_of(rule, cached=1008, matched=1008, stable=1030, known=1030, until=1100) == [1088]


def test_everywhere() -> None:
    rule = BorderRule(snapshots_every(32), 16)
    assert borders_of(rule, cached=32, matched=0, stable=90, known=100, until=170) == [64, 96, 128, 160]


def test_positions_are_multiples_of_the_unit() -> None:
    rule = BorderRule(StateSnapshots(unit=100, interval=0), 16)
    assert rule.unit == 112
    assert borders_of(rule, cached=0, matched=300, stable=600, known=600, until=700) == [224, 560, 672]


def test_the_newest_of_the_answer_replaces_the_one_before() -> None:
    rule = BorderRule(replace(DEFAULTS, interval=128), 16)
    borders = SequenceBorders(marks=(48,), first=0, known=60)
    replaced = {position: rule.is_replaced(borders, position) for position in (48, 64, 128, 192)}
    assert replaced == {48: False, 64: True, 128: False, 192: True}
    assert not BorderRule(snapshots_every(16), 16).is_replaced(borders, 64)


def test_the_expected_number_of_copies() -> None:
    assert BorderRule(DEFAULTS, 16).most(32768) == 32 + 2
    assert BorderRule(replace(DEFAULTS, interval=0), 16).most(32768) == 2
    assert BorderRule(DEFAULTS, 16).most(20) == 1
    assert BorderRule(snapshots_every(64), 16).most(640) == 10


# --- the step loop ---

HYBRID = layout_of({StateCache(64, inputs=0): [0, 1, 2], FullCache(1, 8): [3]}, 16)
ATTENTION = layout_of({FullCache(1, 8): [0, 1]}, 16)
TRACE = AgentTrace(vocab=50)


def core(layout: KvLayout, *, states: int = 64, **settings) -> tuple[EngineCore, FakeBackend]:
    defaults = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "max_num_seqs": 8, "block_size": 16}
    limits = Limits(**(defaults | settings))
    blocks = tuple(states if isinstance(pool.kind, StateCache) else 400 for pool in layout.pools)
    backend = FakeBackend(layout, num_blocks=blocks, next_token=scrambled)
    return generation_core(backend, layout, limits, blocks), backend


def run(layout: KvLayout, trace: AgentTrace = TRACE, **settings) -> TraceRun:
    return run_trace(core(layout, **settings)[0], trace)


def test_an_agent_finds_its_prompt_in_the_cache() -> None:
    hybrid = run(HYBRID)
    assert hybrid.prompt_tokens == 20_400
    assert hybrid.share > 0.865
    few = replace(TRACE, turns=3)
    assert hybrid.answers[:3] == run(ATTENTION, few).answers == run(HYBRID, few, prefix_caching=False).answers


def test_what_the_generation_prompt_adds_does_not_end_the_hits() -> None:
    trace = replace(TRACE, generation_prompt=24, turns=5)
    stable, attention = run(HYBRID, trace), run(ATTENTION, trace)
    assert stable.cached_tokens == attention.cached_tokens
    assert stable.share > 0.69


def test_few_blocks_hold_a_conversation() -> None:
    """One state, and the copies after prompt and answer, and what the next turn needs before they are evicted."""
    few = replace(TRACE, turns=5)
    assert run(HYBRID, few, states=5) == run(HYBRID, few)


def test_an_answer_keeps_one_copy() -> None:
    engine, backend = core(HYBRID)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=[7] * 100, rules=SamplingRules(), max_tokens=300))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    pairs = [pair for plan in backend.plans if plan.state_copies for pair in plan.state_copies[0].tolist()]
    assert pairs == [[1, 2], *[[1, 3]] * 5], "after 96 tokens, then after each 64 in one block"


def test_a_junction_is_kept_by_the_second_request_and_hit_by_the_third() -> None:
    engine, _ = core(HYBRID)
    cached = []
    for name in range(4):
        prompt = [*range(300), *[40 + name] * 300]
        engine.add_request(
            EngineRequest(request_id=str(name), prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=2)
        )
        while engine.has_work:
            cached += [each.num_cached_tokens for each in engine.step().outputs if not each.finish_reason]
    assert cached == [0, 0, 288, 288]
    assert engine.stats.prefix_without_state == 288


@pytest.mark.parametrize("mode", ["none", "align"])
def test_without_snapshots_nothing_is_looked_up(mode: str) -> None:
    engine, backend = core(HYBRID, snapshots=StateSnapshots(mode=mode))
    run_trace(engine, replace(TRACE, turns=2))
    assert (engine.stats.prefix_queries == 0) is (mode == "none")
    assert any(plan.state_copies for plan in backend.plans) is (mode == "align")
