"""Prefix caching of models with recurrent state: snapshots after whole pages, copied by the plan."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from fakes import FakeBackend, mixed_layout, scrambled, snapshots_every, state_layout
from support.engines.replaying import Replaying, Wrong, drafting
from support.suite.rows import each_row

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout, layout_of
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.models.mixers.caches import StateCache

PROMPT = list(range(10, 31))  # 21 tokens


def core(layout: KvLayout, num_blocks: int | tuple[int, ...] = 64, **settings) -> tuple[EngineCore, FakeBackend]:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 4}
    defaults["snapshots"] = snapshots_every(8)
    backend = FakeBackend(layout, num_blocks=num_blocks, next_token=scrambled)
    return generation_core(backend, layout, Limits(**(defaults | settings)), backend.num_blocks), backend


def run(engine: EngineCore, **prompts: list[int]) -> dict[str, list[EngineOutput]]:
    """Outputs of requests that answer with 9 tokens."""
    for name, prompt in prompts.items():
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=9))
    outputs = defaultdict[str, list[EngineOutput]](list)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def answer(prompt: list[int]) -> list[int]:
    history = list(prompt)
    for _ in range(9):
        history.append(scrambled(history))
    return history[len(prompt) :]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@each_row("ahead", [False, True])
@each_row(("layout", "every", "cached"), [(state_layout(), 8, 16), (mixed_layout(), 4, 20)])
def test_a_prefix_is_continued_from_the_last_snapshot(layout: KvLayout, every: int, cached: int, ahead: bool) -> None:
    engine, _ = core(layout, async_scheduling=ahead, snapshots=snapshots_every(every))
    first = run(engine, a=PROMPT)["a"]
    second = run(engine, b=PROMPT)["b"]
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == cached
    assert tokens(first) == tokens(second) == answer(PROMPT)


def test_generated_tokens_are_cached_too() -> None:
    engine, _ = core(state_layout())
    run(engine, a=PROMPT)
    longer = PROMPT + answer(PROMPT) + [3]
    outputs = run(engine, b=longer)["b"]
    assert outputs[0].num_cached_tokens == 24
    assert tokens(outputs) == answer(longer)


@each_row("ahead", [False, True])
@each_row("wrong", [lambda name, place: False, lambda name, place: place % 5 == 3])
def test_drafts_do_not_pass_the_next_snapshot(ahead: bool, wrong: Wrong) -> None:
    """A state after drafts is kept nowhere: the newest token of a step stands before each snapshot."""
    limits = Limits(
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=4,
        snapshots=snapshots_every(4),
        async_scheduling=ahead,
        max_drafts=5,
    )
    backend = FakeBackend(state_layout(), next_token=scrambled)
    longer = PROMPT + answer(PROMPT) + [3]
    proposer = Replaying({"a": answer(PROMPT), "b": answer(longer)}, wrong=wrong)
    engine = generation_core(backend, backend.layout, limits, backend.num_blocks, drafting(proposer, 50))
    assert tokens(run(engine, a=PROMPT)["a"]) == answer(PROMPT)
    outputs = run(engine, b=longer)["b"]
    assert outputs[0].num_cached_tokens == 28
    assert tokens(outputs) == answer(longer)
    assert sum(map(bool, (plan.state_copies for plan in backend.plans))) == 10
    drafts = engine.stats.drafts
    assert drafts is not None
    assert drafts.num_accepted > 5


def test_a_chunk_ends_at_each_snapshot() -> None:
    engine, backend = core(state_layout())
    run(engine, a=PROMPT)
    assert [np.diff(plan.query_start).tolist() for plan in backend.plans[:4]] == [[8], [8], [5], [1]]
    copies = [[pairs.tolist() for pairs in plan.state_copies] for plan in backend.plans]
    assert copies[:3] == [[], [[[1, 2]], []], [[[1, 3]], []]]
    assert sum(map(bool, copies)) == 3, "after 8, 16 and 24 tokens"


def test_a_chunk_within_the_budget_ends_at_the_next_snapshot() -> None:
    engine, backend = core(state_layout(), max_num_batched_tokens=6)
    run(engine, a=PROMPT)
    assert [plan.num_tokens for plan in backend.plans[:5]] == [6, 2, 6, 2, 5]


@pytest.mark.parametrize("settings", [{"prefix_caching": False}, {"chunked_prefill": False}])
def test_chunks_end_anywhere_where_that_is_impossible_or_useless(settings: dict[str, bool]) -> None:
    engine, backend = core(state_layout(), **settings)
    run(engine, a=PROMPT)
    assert backend.plans[0].num_tokens == len(PROMPT)


def test_no_snapshot_without_a_free_block() -> None:
    engine, backend = core(state_layout(), (2, 64))
    run(engine, a=PROMPT)
    assert not any(plan.state_copies for plan in backend.plans)
    assert run(engine, b=PROMPT)["b"][0].num_cached_tokens == 0


def test_a_block_that_is_needed_evicts_the_oldest_snapshot() -> None:
    engine, _ = core(state_layout(), (4, 64))
    run(engine, a=PROMPT)  # The request's state and three snapshots need four blocks.
    assert run(engine, b=PROMPT)["b"][0].num_cached_tokens == 16, "the one after 8 tokens is gone"
    other = [5] * 9
    run(engine, c=other, d=[*other, 6])
    assert tokens(run(engine, e=PROMPT)["e"]) == answer(PROMPT)


def test_a_snapshot_is_read_in_the_step_that_makes_it() -> None:
    """The second request starts in the step before which the snapshot of the first is copied."""
    engine, backend = core(state_layout(), async_scheduling=False)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPT, rules=SamplingRules(), max_tokens=9))
    engine.step()
    outputs = run(engine, b=PROMPT)
    assert outputs["b"][0].num_cached_tokens == 8
    (pairs, _) = backend.plans[1].state_copies
    assert pairs.tolist() == [[1, 2], [1, 3]]


def test_a_preempted_request_continues_from_a_snapshot() -> None:
    engine, backend = core(state_layout(), (20, 15), max_num_seqs=2)
    prompts = {"a": PROMPT, "b": [7, *PROMPT]}
    outputs = run(engine, **prompts)
    assert engine.stats.preemptions > 0
    assert {name: tokens(each) for name, each in outputs.items()} == {n: answer(p) for n, p in prompts.items()}
    resumed = [
        int(plan.context[np.flatnonzero(plan.rows == start.row)[0]])
        for plan in backend.plans
        for start in plan.starts
        if len(start.token_ids) > start.num_prompt
    ]
    assert resumed
    assert all(context % 8 == 0 and context > 0 for context in resumed)


def test_states_alone_are_cached_by_prefix() -> None:
    """A model without attention."""
    engine, _ = core(layout_of({StateCache(9, inputs=0): [0, 1]}, 4), 9)
    run(engine, a=PROMPT)
    outputs = run(engine, b=PROMPT)["b"]
    assert outputs[0].num_cached_tokens == 16
    assert tokens(outputs) == answer(PROMPT)
    assert engine.stats.kv_blocks_total == 8
