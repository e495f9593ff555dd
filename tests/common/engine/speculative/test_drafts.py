"""Drafts: what is proposed, what plans carry, what becomes of the accepted ones and of what follows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeBackend, FakeShards, counting, full_layout, hybrid_layout, pools_layout
from support.engines.engine_runs import drain, new_tokens
from support.engines.replaying import Replaying, drafting
from support.engines.scripted_masks import FINAL, add_masked, allowed
from support.suite.rows import each_row

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, MakeScheduler, generation_core, make_kv_manager
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.sizing import split_bytes
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import Drafter
from pagoda.common.engine.steps.contract import PREVIOUS, StepPlan
from pagoda.common.engine.structured_output.grammar import Thinking
from pagoda.common.engine.structured_output.token_mask import TokenMaskState

VOCAB = 1000
TEXTS = {name: list(range(11, 60)) for name in "abcd"}
"""Answers to a prompt that ends with 10."""


def start(proposer: Any, drafts: int, num_blocks: int = 64, **settings: Any) -> tuple[EngineCore, FakeBackend]:
    defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    limits = Limits(**(defaults | {"max_drafts": drafts, "async_scheduling": False} | settings))
    backend = FakeBackend(full_layout(), num_blocks=num_blocks, next_token=counting)
    return generation_core(backend, backend.layout, limits, (num_blocks,), drafting(proposer, VOCAB)), backend


def add(engine: EngineCore, name: str, prompt: list[int], max_tokens: int = 12, **settings: Any) -> None:
    rules = settings.pop("rules", SamplingRules())
    engine.add_request(
        EngineRequest(request_id=name, prompt_token_ids=prompt, rules=rules, max_tokens=max_tokens, **settings)
    )


def ids(plan: StepPlan, index: int) -> list[int]:
    return plan.token_ids[plan.query_start[index] : plan.query_start[index + 1]].tolist()


def drafts_per_step(backend: FakeBackend) -> list[list[int]]:
    return [[] if plan.num_drafts is None else plan.num_drafts.tolist() for plan in backend.plans]


def test_rows_with_drafts_stand_between_single_tokens_and_chunks() -> None:
    engine, backend = start(Replaying(TEXTS, most=lambda name, place: 0 if name == "a" else 2), 3)
    for name in "bac":
        add(engine, name, [10])
    engine.step()
    add(engine, "d", [10] * 30)
    engine.step()
    plan = backend.plans[1]
    assert plan.rows.tolist() == [1, 0, 2, 3]
    assert plan.num_drafts.tolist() == [0, 2, 2, 0]
    assert [ids(plan, index) for index in range(3)] == [[11], [11, 12, 13], [11, 12, 13]]
    assert np.diff(plan.query_start).tolist() == [1, 3, 3, 9], "chunks get what drafts leave of the budget"
    assert plan.samples.tolist() == [True, True, True, False]
    engine.step()
    assert np.diff(backend.plans[2].query_start).tolist() == [1, 3, 3, 9]


def test_accepted_drafts_and_the_token_after_them_come_in_one_output() -> None:
    engine, backend = start(Replaying(TEXTS, wrong=lambda name, place: place == 5), 3)
    add(engine, "a", [10], rules=SamplingRules(logprobs=0))
    outputs = drain(engine)["a"]
    assert [output.new_token_ids for output in outputs] == [[11], [12, 13, 14, 15], [16], [17, 18, 19, 20], [21, 22]]
    assert drafts_per_step(backend) == [[], [3], [3], [3], [1]], "the last step needs no more than one"
    positions = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token_ids[0] for entry in positions] == list(range(11, 23))
    assert [entry.logprobs[0] for entry in positions] == [-float(place) for place in range(1, 13)]
    assert outputs[0].scheduled > 0
    assert not any(output.scheduled for output in outputs[1:])


def test_the_last_token_of_a_prompt_may_have_drafts() -> None:
    engine, _ = start(Replaying(TEXTS), 3)
    add(engine, "a", [10] * 17)
    outputs = drain(engine)["a"]
    assert outputs[0].new_token_ids == [11, 12, 13, 14]
    assert outputs[0].scheduled > 0
    assert not any(output.scheduled for output in outputs[1:])


def test_a_step_ahead_counts_drafts_as_accepted_until_the_result_is_known() -> None:
    proposer = Replaying(TEXTS, wrong=lambda name, place: place == 4)
    engine, backend = start(proposer, 2, async_scheduling=True)
    add(engine, "a", [10])
    outputs = drain(engine)["a"]
    assert [output.new_token_ids for output in outputs] == [
        [11],
        [12, 13, 14],
        [15],
        [16],
        [17, 18, 19],
        [20],
        [21, 22],
    ]
    assert [(plan.context[0], ids(plan, 0)) for plan in backend.plans] == [
        (0, [10]),
        (1, [PREVIOUS, 12, 13]),
        (4, [PREVIOUS, 1, 16]),
        (7, [PREVIOUS, 18, 19]),
        (8, [PREVIOUS, 17, 18]),
        (9, [PREVIOUS, 18, 19]),
        (10, [20, 21]),
    ]


def test_a_proposer_continues_the_drafts_in_flight_unless_one_is_known_to_be_wrong() -> None:
    proposer = Replaying(TEXTS, wrong=lambda name, place: place == 4)
    engine, _ = start(proposer, 2, async_scheduling=True)
    add(engine, "a", [10])
    drain(engine)
    drafts = [(context.drafts, context.num_tokens) for context in proposer.contexts]
    assert drafts == [([], 3), ([12, 13], 3), ([1, 16], 3), ([], 3), ([], 3), ([], 1)]
    assert {context.request_id for context in proposer.contexts} == {"a"}
    assert all(context.prompt.tolist() == [10] for context in proposer.contexts)


def waiting(proposer: Replaying) -> MakeScheduler:
    """What makes schedulers whose proposer knows the result of a step with drafts before the next is planned."""
    return lambda limits, kv: Scheduler(limits, kv, drafter=Drafter(proposer, VOCAB, plans_ahead=False))


def test_a_step_waits_for_drafts_in_flight_if_the_proposer_does() -> None:
    proposer = Replaying(TEXTS, wrong=lambda name, place: place == 4)
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_drafts=2)
    backend = FakeBackend(full_layout(), next_token=counting)
    engine = generation_core(backend, backend.layout, limits, (64,), waiting(proposer))
    add(engine, "a", [10])
    outputs = drain(engine)["a"]
    assert [output.new_token_ids for output in outputs] == [[11], [12, 13, 14], [15], [16, 17, 18], [19, 20, 21], [22]]
    assert [(plan.context[0], ids(plan, 0)) for plan in backend.plans] == [
        (0, [10]),
        (1, [PREVIOUS, 12, 13]),
        (4, [14, 1, 16]),
        (5, [15, 16, 17]),
        (8, [18, 19, 20]),
        (11, [21]),
    ], "only the first step with drafts is planned ahead; a wrong draft wastes no other step"
    assert all(not context.drafts for context in proposer.contexts)


def test_shards_wait_together() -> None:
    """One shard has drafts in flight; the other must not run a step alone meanwhile."""
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_drafts=2)
    backend = FakeShards(full_layout(), 2, num_blocks=40, next_token=counting)
    proposer = Replaying(TEXTS, most=lambda name, place: 1000 if name == "a" else 0)
    engine = sharded_core(backend, backend.layout, limits, (40,), 2, waiting(proposer))
    add(engine, "a", [10], max_tokens=13)
    add(engine, "b", [10], max_tokens=5)
    tokens = {name: new_tokens(outputs) for name, outputs in drain(engine).items()}
    assert tokens == {"a": TEXTS["a"][:13], "b": TEXTS["b"][:5]}
    counts = [len([plan for plan in shard.plans if plan is not None]) for shard in backend.shards]
    assert sorted(counts) == [5, 5]
    drafts = engine.stats.drafts
    assert drafts is not None
    assert drafts.num_accepted == 8


def test_no_drafts_beyond_a_length() -> None:
    for longest, want in ((None, 3), (9, 3), (7, 1), (6, 0)):
        engine, backend = start(Replaying(TEXTS), 3, max_draft_len=longest)
        add(engine, "a", [7, 8, 9, 10])
        drain(engine)
        drafted = [plan for plan in backend.plans if plan.num_drafts is not None]
        assert max((int(plan.num_drafts[0]) for plan in drafted), default=0) == want
        ends = [int(plan.context[0]) + 1 + int(plan.num_drafts[0]) for plan in drafted]
        assert max(ends, default=0) < (longest or 64)


def test_without_drafts_the_proposer_is_not_asked() -> None:
    proposer = Replaying(TEXTS)
    engine, backend = start(proposer, 0)
    add(engine, "a", [10])
    assert new_tokens(drain(engine)["a"]) == TEXTS["a"][:12]
    assert not proposer.contexts
    assert all(plan.num_drafts is None for plan in backend.plans)


def test_a_plan_without_a_draft_has_none() -> None:
    engine, backend = start(Replaying(TEXTS, most=lambda name, place: 0), 3)
    add(engine, "a", [10])
    drain(engine)
    assert all(plan.num_drafts is None for plan in backend.plans)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_follows_a_stop_token_is_dropped(ahead: bool) -> None:
    engine, _ = start(Replaying(TEXTS), 7, async_scheduling=ahead)
    add(engine, "a", [10], rules=SamplingRules(logprobs=0), stop_token_ids=frozenset({14}))
    add(engine, "b", [10], rules=SamplingRules(min_tokens=5, stop_ids=(14,)), stop_token_ids=frozenset({14, 16}))
    outputs = drain(engine)
    assert new_tokens(outputs["a"]) == [11, 12, 13, 14]
    assert sum(len(output.logprobs) for output in outputs["a"]) == 4
    last = outputs["a"][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", 14)
    assert new_tokens(outputs["b"]) == [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_what_follows_the_last_token_of_a_grammar_is_dropped(drafts: int) -> None:
    want: list[int] = []
    texts = {"a": [0] * 40}
    for number in (0, drafts):
        engine, backend = start(Replaying(texts), number)
        backend.next_token = lambda history: FINAL if len(history) > 7 else 20
        add_masked(
            engine, EngineRequest(request_id="a", prompt_token_ids=[1], rules=SamplingRules(), max_tokens=30), 64
        )
        outputs = drain(engine)["a"]
        assert outputs[-1].finish_reason == "stop"
        assert want in ([], new_tokens(outputs))
        want = new_tokens(outputs)
        assert want.index(FINAL) == len(want) - 1 > 6
        texts["a"] = want + [7] * 40
    assert len(outputs) <= 1 + -(-len(want) // (1 + drafts))
    for plan in backend.plans[1:]:
        masks = backend.masks[plan.step]
        assert masks.after.tolist() == list(range(len(masks.after)))


def test_there_are_masks_up_to_the_first_draft_that_the_grammar_forbids() -> None:
    engine, backend = start(Replaying({"a": [20, 21, 23, 25, 30] * 20}), 3)
    add_masked(engine, EngineRequest(request_id="a", prompt_token_ids=[10], rules=SamplingRules(), max_tokens=30), 64)
    answer = new_tokens(drain(engine)["a"])
    numbers = []
    for plan in backend.plans[1:]:
        known, drafts, number = answer[: plan.context[0]], ids(plan, 0)[1:], 0
        while number < len(drafts) and drafts[number] in allowed(known + drafts[:number], 64):
            number += 1
        assert backend.masks[plan.step].after.tolist() == list(range(1 + number))
        numbers.append(number)
    assert {0, 1} <= set(numbers)
    assert all(token in allowed(answer[:place], 64) for place, token in enumerate(answer))


@each_row("ahead", [False, True])
@each_row("drafts", [1, 3, 7])
def test_a_reasoning_budget_ends_among_drafts(drafts: int, ahead: bool) -> None:
    """The first tokens have no mask."""
    thinking = Thinking(starts=(), ends=((7,),), open=True, budget=5, in_grammar=False)
    engine, _ = start(Replaying(TEXTS), drafts, async_scheduling=ahead)
    request = EngineRequest(request_id="a", prompt_token_ids=[10], rules=SamplingRules(), max_tokens=9)
    engine._grammars._add(request, TokenMaskState(request.rules, 64, (), thinking=thinking))
    assert new_tokens(drain(engine)["a"]) == [11, 12, 13, 14, 15, 7, 8, 9, 10]


@each_row(
    ("rules", "first"),
    [
        (SamplingRules(), 0),
        (SamplingRules(min_tokens=4, stop_ids=(999,)), 4),
        (SamplingRules(bad_words=((1, 2, 3), (5,))), 3),
        (SamplingRules(min_tokens=2, stop_ids=(999,), bad_words=((1, 2, 3),)), 3),
    ],
)
@each_row("ahead", [False, True])
def test_no_drafts_while_a_rule_depends_on_the_number_of_tokens(rules: SamplingRules, first: int, ahead: bool) -> None:
    proposer = Replaying(TEXTS)
    engine, _ = start(proposer, 3, async_scheduling=ahead)
    seen: list[int] = []
    propose = proposer.propose
    proposer.propose = lambda contexts: seen.extend(len(each.outputs) for each in contexts) or propose(contexts)
    add(engine, "a", [10], rules=rules)
    assert new_tokens(drain(engine)["a"]) == TEXTS["a"][:12]
    assert min(seen) == max(first, 0 if ahead else 1)


def test_drafts_end_where_the_request_does() -> None:
    engine, backend = start(Replaying(TEXTS), 3, max_model_len=10)
    for name, prompt, max_tokens in (("a", 1, 4), ("b", 6, 40), ("c", 1, 6)):
        add(engine, name, [10] * prompt, max_tokens=max_tokens)
    assert {name: len(new_tokens(each)) for name, each in drain(engine).items()} == {"a": 4, "b": 4, "c": 6}
    assert drafts_per_step(backend) == [[], [2, 2, 3], []]


def test_drafts_do_not_exceed_the_token_budget() -> None:
    engine, backend = start(Replaying(TEXTS), 3, max_num_batched_tokens=7)
    for name in "abc":
        add(engine, name, [10])
    drain(engine)
    assert drafts_per_step(backend)[1] == [0, 3, 1]
    assert max(plan.num_tokens for plan in backend.plans) == 7


def test_drafts_preempt_nobody() -> None:
    """The drafts of one request get the last block, those of the other what is left of its own block."""
    proposer = Replaying(TEXTS)
    engine, backend = start(proposer, 3, num_blocks=4, prefix_caching=False, async_scheduling=True)
    for name in "ab":
        add(engine, name, [9, 10], max_tokens=8)
    engine.step()
    assert [ids(backend.plans[1], index) for index in range(2)] == [[PREVIOUS, 12, 13, 14], [PREVIOUS, 12]]
    outputs = engine.step().outputs
    assert [output.new_token_ids for output in outputs] == [[12, 13, 14, 15], [12, 13]]
    assert engine.stats.preemptions == 1, "of b, for its next token"
    assert [context.drafts for context in proposer.contexts] == [[], [], [12, 13, 14], [12]]
    assert {name: new_tokens(each) for name, each in drain(engine).items()} == {
        "a": [16, 17, 18],
        "b": list(range(14, 19)),
    }


def test_pages_of_accepted_drafts_are_cached_and_those_of_rejected_ones_are_not() -> None:
    for wrong in (lambda name, place: False, lambda name, place: place % 4 == 2, lambda name, place: True):
        engine, backend = start(Replaying(TEXTS, wrong), 7)
        add(engine, "a", [10], max_tokens=12)
        drain(engine)
        rejected = [10, *ids(backend.plans[1], 0)]
        for prompt, cached in (([*range(10, 23), 0], 12), (rejected, 0 if wrong("", 2) else 8), ([*range(10, 22)], 8)):
            add(engine, "b", prompt, max_tokens=1)
            assert drain(engine)["b"][0].num_cached_tokens == cached


class Fixed:
    """Proposes the same tokens for every sequence."""

    name = "fixed"

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.calls = list(tokens), 0

    def finish(self, request_id, outputs):
        pass

    def propose(self, contexts):
        self.calls += 1
        return [self.tokens for _ in contexts]


@each_row("token", [VOCAB, -1, 10**30])
@each_row("ahead", [False, True])
def test_drafts_outside_the_vocabulary_turn_them_off(token: int, ahead: bool, caplog: pytest.LogCaptureFixture) -> None:
    proposer = Fixed(5, token)
    engine, backend = start(proposer, 3, async_scheduling=ahead)
    for name in "ab":
        add(engine, name, [10])
    outputs = drain(engine)
    assert {name: new_tokens(each) for name, each in outputs.items()} == {name: TEXTS[name][:12] for name in "ab"}
    assert proposer.calls == 1
    assert all(plan.num_drafts is None for plan in backend.plans)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "ERROR",
            f"fixed proposed token {token}, but the vocabulary has 1000 tokens; drafts are off until the restart: use "
            "a proposer made for this model's tokenizer",
        )
    ]


def test_a_proposer_may_return_more_than_it_was_asked_for() -> None:
    engine, backend = start(Fixed(*[VOCAB - 1] * 40), 3)
    add(engine, "a", [10])
    assert new_tokens(drain(engine)["a"]) == TEXTS["a"][:12]
    assert max(map(max, filter(None, drafts_per_step(backend)))) == 3


def test_windows_have_blocks_for_drafts() -> None:
    """A sequence with 7 drafts, after 7 in flight, needs more than the window and a step of 8 tokens."""
    longest, split, alone = [], [], []
    for drafts in (0, 7):
        limits = Limits(max_model_len=64, max_num_batched_tokens=8, max_num_seqs=4, block_size=4, max_drafts=drafts)
        backend = FakeBackend(hybrid_layout(window=6), next_token=counting)
        longest.append(make_kv_manager(backend, backend.layout, limits, (19,)).max_tokens)
        split.append(split_bytes(pools_layout(), limits, (1, 1), 100))
        one = replace(limits, max_num_seqs=1, max_num_batched_tokens=4)
        alone.append(split_bytes(pools_layout(), one, (1, 1), 40))
    assert longest == [52, 48]
    assert alone == [(26, 14), (29, 11)]
    assert split == [(71, 29), (74, 26)], "the first pool has the windows"
