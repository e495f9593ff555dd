"""What each step computes, request by request. Results are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes import full_layout, row_items
from support.suite.rows import each_row

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import RunningBatch
from pagoda.common.engine.scheduling.scheduler import Scheduler, decode_first, first_chunk, split_budget
from pagoda.common.engine.steps.contract import EMBEDDED, FIRST_ROW, PREVIOUS, StepPlan, StepResult, TokenLogprobs
from pagoda.common.errors import ConfigError, RequestError

EOS = 0


def result_of(plan: StepPlan) -> StepResult:
    """Token 7 wherever the plan samples."""
    return StepResult(plan.step, np.where(plan.samples, 7, -1).astype(np.int32))


@dataclass
class Bench:
    """A scheduler and the shortest way to drive it."""

    num_blocks: int = 65
    limits: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
        limits = Limits(**(defaults | self.limits))
        kv = KvManager(
            full_layout(limits.block_size),
            (self.num_blocks,),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_step_tokens=limits.max_num_batched_tokens,
            prefix_caching=limits.prefix_caching,
        )
        self.now = 0.0
        self.scheduler = Scheduler(limits, kv, clock=lambda: self.now)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 8, **settings) -> None:
        tokens = [ord(name)] * prompt if isinstance(prompt, int) else prompt
        given = {"rules": SamplingRules(), "stop_token_ids": frozenset({EOS}), "eos_token_ids": frozenset({EOS})}
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=tokens, max_tokens=max_tokens, **(given | settings))
        )

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def report(self, plan: StepPlan, token: int | list[int] = 7, **logprobs) -> list[EngineOutput]:
        tokens = np.where(plan.samples, token, -1).astype(np.int32)
        outputs = self.scheduler.update(plan, StepResult(plan.step, tokens, **logprobs)).outputs
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def step(self, token: int | list[int] = 7) -> StepPlan:
        plan = self.plan()
        self.report(plan, token)
        return plan

    @property
    def running(self) -> str:
        return "".join(request.request_id for request in self.scheduler.running)


def counts(plan: StepPlan) -> list[int]:
    return np.diff(plan.query_start).tolist()


class TestBudget:
    def test_a_step_shares_tokens_between_decodes_and_chunks(self):
        bench = Bench()
        bench.add("a", 10)
        bench.add("b", 20)
        first = bench.step()
        assert counts(first) == [10, 6]
        assert first.samples.tolist() == [True, False]
        second = bench.step()
        assert counts(second) == [1, 14], "b ends its prompt"
        assert second.token_ids.tolist() == [7, *[ord("b")] * 14]
        assert second.context.tolist() == [10, 6]
        assert second.starts == ()
        assert counts(bench.step()) == [1, 1]

    def test_one_token_sequences_stand_first_and_decodes_are_never_starved(self):
        bench = Bench(limits={"max_num_batched_tokens": 8})
        bench.add("a", 30)
        bench.add("b", 1)
        assert counts(bench.step()) == [8]
        assert counts(bench.step()) == [8]
        bench = Bench(limits={"max_num_batched_tokens": 8, "policy": "priority"})
        bench.add("b", 2, priority=5)
        bench.step()
        bench.add("a", 30, priority=0)
        for _ in range(3):
            plan = bench.step()
            assert counts(plan) == [1, 7]
            assert plan.rows.tolist() == [0, 1]

    def test_the_long_prompt_threshold(self):
        bench = Bench(limits={"long_prefill_token_threshold": 4})
        bench.add("a", 10)
        bench.add("b", 3)
        assert counts(bench.step()) == [4, 3]
        assert counts(bench.step()) == [1, 4]
        assert counts(bench.step()) == [1, 2]

    def test_without_chunks_a_prompt_goes_whole_or_not_at_all(self):
        bench = Bench(limits={"chunked_prefill": False, "max_num_batched_tokens": 64})
        bench.add("a", 40)
        bench.add("b", 30)
        bench.add("c", 5)
        assert counts(bench.step()) == [40], "b does not fit, and c does not overtake it"
        assert counts(bench.step()) == [1, 30, 5]

    def test_rows_are_the_limit_and_are_reused(self):
        bench = Bench(limits={"max_num_seqs": 2})
        for name in "abc":
            bench.add(name, 2, max_tokens=2)
        assert bench.step().rows.tolist() == [0, 1]
        bench.step()
        assert bench.outputs["a"][-1].finish_reason == "length"
        plan = bench.step()
        assert [start.row for start in plan.starts] == plan.rows.tolist()
        assert bench.running == "c"

    def test_nothing_to_do_is_none(self):
        assert Bench().scheduler.schedule() is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "prompt", "max_tokens"), [("prompt", 0, 1), ("prompt", 64, 1), ("max_tokens", 4, 0)]
    )
    def test_requests_that_can_never_run(self, field, prompt, max_tokens):
        bench = Bench()
        with pytest.raises(RequestError) as error:
            bench.add("a", prompt, max_tokens)
        assert error.value.field == field
        assert bench.scheduler.num_unfinished == 0

    def test_a_prompt_larger_than_the_pool(self):
        bench = Bench(num_blocks=5)
        with pytest.raises(RequestError, match="4 blocks of 4 tokens"):
            bench.add("a", 16)
        bench.add("b", 15)

    def test_the_same_id_twice(self):
        bench = Bench()
        bench.add("a", 2)
        with pytest.raises(RequestError, match="already"):
            bench.add("a", 2)

    @each_row(
        "limits",
        [
            {"policy": "lottery"},
            {"max_num_seqs": 17},
            {"chunked_prefill": False},
            {"chunked_prefill": False, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 4},
        ],
    )
    def test_limits_that_contradict_each_other(self, limits):
        with pytest.raises(ConfigError):
            Bench(limits=limits)


class TestEndings:
    def test_a_stop_token_names_itself_and_eos_does_not(self):
        bench = Bench()
        bench.add("a", 2, stop_token_ids=frozenset({5, EOS}))
        bench.add("b", 2)
        bench.step([5, EOS])
        a, b = bench.outputs["a"][0], bench.outputs["b"][0]
        assert (a.finish_reason, a.stop_reason, a.new_token_ids) == ("stop", 5, [5])
        assert (b.finish_reason, b.stop_reason, b.new_token_ids) == ("stop", None, [EOS])
        assert bench.scheduler.num_unfinished == 0

    def test_min_tokens_holds_a_stop_back(self):
        bench = Bench()
        bench.add("a", 2, rules=SamplingRules(min_tokens=3))
        reasons = []
        for _ in range(3):
            bench.step(EOS)
            reasons.append(bench.outputs["a"][-1].finish_reason)
        assert reasons == [None, None, "stop"]

    def test_a_stop_on_the_last_token_is_a_stop(self):
        bench = Bench()
        bench.add("a", 2, max_tokens=1)
        bench.step(EOS)
        assert bench.outputs["a"][0].finish_reason == "stop"

    def test_the_context_is_an_end(self):
        bench = Bench(limits={"max_model_len": 5})
        bench.add("a", 3, max_tokens=2)
        bench.add("b", 3, max_tokens=9)
        bench.step()
        bench.step()
        assert [bench.outputs[name][-1].finish_reason for name in "ab"] == ["length", "length"]

    def test_a_lone_request_that_outgrows_the_pool_ends_by_length(self):
        bench = Bench(num_blocks=4)
        bench.add("a", 5, max_tokens=50)
        while bench.scheduler.num_unfinished:
            bench.step()
        assert sum(len(output.new_token_ids) for output in bench.outputs["a"]) == 12 + 1 - 5
        assert bench.outputs["a"][-1].finish_reason == "length"
        assert bench.scheduler.stats().preemptions == 0
        bench.scheduler.check_integrity()


class TestPreemption:
    def test_the_last_in_line_goes_and_comes_back_with_all_its_tokens(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", 7)
        bench.add("b", 7)
        bench.step()
        bench.step()
        assert bench.running == "ab"
        plan = bench.step()
        assert bench.running == "a"
        assert counts(plan) == [1]
        assert bench.scheduler.stats().preemptions == 1
        while bench.running != "b":
            plan = bench.step()
        assert bench.running == "b"
        (start,) = plan.starts
        assert start.token_ids.tolist() == [ord("b")] * 7 + [7] * 2
        assert start.num_prompt == 7
        assert counts(plan) == [9]

    def test_no_one_starts_in_a_step_that_preempts(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False, "long_prefill_token_threshold": 4})
        bench.add("a", 7)
        bench.add("b", 7)
        for _ in range(3):
            assert len(bench.step().rows) == 2
        assert counts(bench.step()) == [1]
        assert counts(bench.step()) == [1, 4]

    def test_a_preempted_request_goes_before_those_that_never_ran(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        for name in "abc":
            bench.add(name, 7)
        while bench.scheduler.num_unfinished:
            bench.step()
        first_ends = [name for name, outputs in bench.outputs.items() if outputs[-1].finish_reason]
        assert first_ends == ["a", "b", "c"]
        assert all(len(outputs) == 8 for outputs in bench.outputs.values())
        bench.scheduler.check_integrity()

    def test_by_priority_the_least_urgent_goes_even_if_it_came_first(self):
        bench = Bench(num_blocks=6, limits={"policy": "priority", "prefix_caching": False})
        bench.add("a", 7, priority=9)
        bench.step()
        bench.add("b", 7, priority=1)
        bench.step()
        bench.step()
        assert bench.running == "ba"
        bench.step()
        assert bench.running == "b"

    def test_priority_decides_who_starts(self):
        bench = Bench(limits={"policy": "priority", "max_num_seqs": 1})
        bench.add("a", 2, priority=1, arrival=1.0)
        bench.add("b", 2, priority=0, arrival=9.0)
        bench.add("c", 2, priority=1, arrival=0.5)
        order = []
        while bench.scheduler.num_unfinished:
            bench.step()
            order += bench.running
        assert "".join(dict.fromkeys(order)) == "bca"

    def test_a_newcomer_leaves_a_block_for_each_running_request(self):
        bench = Bench(num_blocks=5, limits={"prefix_caching": False})
        bench.add("a", 4)
        bench.add("b", 12)
        assert counts(bench.step()) == [4]
        assert bench.running == "a"


class TestPrefix:
    def test_requests_of_one_step_share_their_prefix(self):
        bench = Bench(limits={"max_num_batched_tokens": 32})
        bench.add("a", list(range(1, 11)))
        bench.add("b", list(range(1, 11)))
        plan = bench.step()
        assert counts(plan) == [10, 2]
        assert plan.context.tolist() == [0, 8]
        assert plan.block_tables[0].tolist() == [[1, 2, 3], [1, 2, 4]]
        assert [bench.outputs[name][0].num_cached_tokens for name in "ab"] == [0, 8]
        stats = bench.scheduler.stats()
        assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)

    def test_pages_of_an_unfinished_prompt_are_found_even_those_of_this_step(self):
        bench = Bench(limits={"long_prefill_token_threshold": 4})
        bench.add("a", list(range(1, 17)))
        bench.step()
        bench.add("b", list(range(1, 17)))
        plan = bench.step()
        assert plan.context.tolist() == [4, 8]
        assert plan.block_tables[0].tolist() == [[1, 2, 0], [1, 2, 3]]

    def test_generated_pages_are_found_too(self):
        bench = Bench()
        bench.add("a", [1, 2, 3], max_tokens=6)
        while bench.scheduler.num_unfinished:
            bench.step()
        bench.add("b", [1, 2, 3, *[7] * 6, 9])
        assert bench.step().context.tolist() == [8]

    def test_the_page_of_the_uncomputed_last_token_is_not(self):
        bench = Bench()
        bench.add("a", [1, 2, 3], max_tokens=5)
        while bench.scheduler.num_unfinished:
            bench.step()
        bench.add("b", [1, 2, 3, *[7] * 5, 9])
        assert bench.step().context.tolist() == [4]

    def test_a_page_is_found_once_the_token_after_it_is_known(self):
        bench = Bench()
        bench.add("a", [1, 2, 3], max_tokens=9)
        one, two = bench.plan(), bench.plan()
        bench.report(one, 5)
        bench.add("b", [1, 2, 3, 5, 9], max_tokens=1)
        three = bench.plan()
        assert three.context[three.rows == 1].tolist() == [0], "the step that computes its last token is in flight"
        bench.scheduler.abort(["b"])
        bench.report(two, 6)
        bench.add("c", [1, 2, 3, 5, 9], max_tokens=1)
        four = bench.plan()
        assert four.context[four.rows == 1].tolist() == [4]

    def test_pages_of_one_token(self):
        bench = Bench(limits={"block_size": 1})
        bench.add("a", [1, 2], max_tokens=9)
        bench.step(5)
        bench.step(6)
        bench.add("b", [1, 2, 5, 6, 9], max_tokens=1)
        plan = bench.plan()
        assert plan.context[plan.rows == 1].tolist() == [3], "6 is not computed yet"


class TestPlanningAhead:
    def test_the_token_in_flight_is_named_previous(self):
        bench = Bench()
        bench.add("a", 3, max_tokens=3)
        one, two, three = bench.plan(), bench.plan(), None
        assert two.token_ids.tolist() == [PREVIOUS]
        assert two.context.tolist() == [3]
        bench.report(one, 5)
        three = bench.plan()
        assert three.token_ids.tolist() == [PREVIOUS]
        assert bench.scheduler.schedule() is None, "never past max_tokens"
        bench.report(two, 6)
        assert bench.scheduler.schedule() is None
        bench.report(three, 8)
        assert [output.new_token_ids for output in bench.outputs["a"]] == [[5], [6], [8]]
        assert bench.outputs["a"][-1].finish_reason == "length"

    def test_a_known_token_is_named_itself(self):
        bench = Bench()
        bench.add("a", 3)
        bench.report(bench.plan(), 5)
        assert bench.plan().token_ids.tolist() == [5]

    def test_results_after_the_end_are_dropped(self):
        bench = Bench()
        bench.add("a", 3)
        one, two = bench.plan(), bench.plan()
        assert len(bench.report(one, EOS)) == 1
        assert bench.scheduler.num_unfinished == 0
        assert bench.report(two, 5) == []
        bench.scheduler.check_integrity()

    def test_row_and_blocks_serve_the_next_while_a_step_is_in_flight(self):
        bench = Bench(num_blocks=3, limits={"max_num_seqs": 1})
        bench.add("a", 3)
        bench.add("b", 3)
        one, two = bench.plan(), bench.plan()
        bench.report(one, EOS)
        three = bench.plan()
        assert three.rows.tolist() == [0]
        assert bench.report(two, 5) == []
        assert bench.report(three, 6)[0].request_id == "b"
        assert bench.plan().token_ids.tolist() == [6], "the stale result did not touch the row"

    def test_preemption_with_a_token_in_flight(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", 7)
        bench.add("b", 7)
        one, two = bench.plan(), bench.plan()
        three = bench.plan()
        assert bench.running == "a"
        assert counts(three) == [1]
        bench.scheduler.abort(["a"])
        assert bench.scheduler.schedule() is None, "b has two tokens in flight"
        bench.report(one, 5)
        assert bench.scheduler.schedule() is None
        assert [output.request_id for output in bench.report(two, 6)] == ["b"]
        four = bench.plan()
        assert four.starts[0].token_ids.tolist() == [ord("b")] * 7 + [5, 6]
        assert bench.report(three) == []
        bench.report(four, 8)
        assert [output.new_token_ids for output in bench.outputs["b"]] == [[5], [6], [8]]

    def test_a_preempted_request_can_end_by_its_token_in_flight(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", 7)
        bench.add("b", 7)
        one, two = bench.plan(), bench.plan()
        bench.report(one)
        bench.plan()
        assert bench.running == "a"
        bench.report(two, [7, EOS])
        assert bench.outputs["b"][-1].finish_reason == "stop"
        assert bench.scheduler.stats().waiting == 0


class TestTelling:
    """What outputs say besides tokens."""

    def test_when_a_request_first_ran_goes_with_its_first_output(self):
        bench = Bench(limits={"max_num_seqs": 1})
        bench.add("a", 20, max_tokens=2)
        bench.add("b", 3, max_tokens=3)
        for now in range(1, 7):
            bench.now = float(now)
            bench.step()
        assert [output.scheduled for output in bench.outputs["a"]] == [1.0, 0.0], "its second chunk ran at 2"
        assert [output.scheduled for output in bench.outputs["b"]] == [4.0, 0.0, 0.0], "it waited behind the other"

    def test_preempted_requests_say_how_often_and_no_other_start(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", 7)
        bench.add("b", 7)
        while bench.scheduler.num_unfinished:
            bench.now += 1.0
            bench.step()
        assert [output.scheduled for output in bench.outputs["b"]] == [1.0] + [0.0] * 7
        assert [output.num_preemptions for output in bench.outputs["b"]] == [0, 0, 1, 0, 0, 0, 0, 1]
        assert all(output.num_preemptions == 0 for output in bench.outputs["a"])

    def test_one_preempted_within_its_prompt_started_when_it_first_ran(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False, "long_prefill_token_threshold": 1})
        bench.add("a", 3, max_tokens=12)
        bench.add("b", 12, max_tokens=2)
        while bench.scheduler.num_unfinished:
            bench.now += 1.0
            bench.step()
        assert [output.scheduled for output in bench.outputs["b"]] == [1.0, 0.0]
        assert bench.outputs["b"][0].num_preemptions == bench.scheduler.stats().preemptions == 2

    def test_a_token_in_flight_tells_of_the_preemption_after_it(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", 7)
        bench.add("b", 7)
        one, two = bench.plan(), bench.plan()
        bench.report(one)
        bench.plan()
        assert bench.running == "a"
        bench.report(two)
        assert [output.num_preemptions for output in bench.outputs["b"]] == [0, 1]


class TestAbort:
    def test_running_waiting_and_unknown(self):
        bench = Bench(limits={"max_num_seqs": 1})
        bench.add("a", 3)
        bench.add("b", 3)
        plan = bench.plan()
        bench.scheduler.abort(["a", "b", "nobody", "a"])
        assert bench.report(plan) == []
        assert bench.scheduler.num_unfinished == 0
        bench.scheduler.check_integrity()

    def test_blocks_are_free_at_once(self):
        bench = Bench()
        bench.add("a", 9)
        bench.step()
        assert bench.scheduler.stats().kv_blocks_used == 3
        bench.scheduler.abort(["a"])
        assert bench.scheduler.stats().kv_blocks_used == 0


class TestLogprobs:
    def block(self, *tokens: int) -> TokenLogprobs:
        ids = np.array([[token, 1] for token in tokens], np.int32)
        return TokenLogprobs(ids, np.full(ids.shape, -0.5, np.float32), np.arange(1, len(tokens) + 1, dtype=np.int32))

    def test_of_new_tokens(self):
        bench = Bench()
        bench.add("a", 3)
        bench.add("b", 3, rules=SamplingRules(logprobs=1))
        plan = bench.plan()
        a, b = bench.report(plan, 7, logprobs={1: self.block(7)})
        assert a.logprobs is None
        assert b.logprobs[0].token_ids == [7, 1]
        assert b.logprobs[0].logprobs == [-0.5, -0.5]
        assert b.logprobs[0].rank == 1

    def test_of_the_prompt_in_chunks_sent_whole_and_once(self):
        bench = Bench(limits={"max_num_batched_tokens": 8})  # A token with logprobs takes two.
        bench.add("a", [1, 2, 3, 4, 5, 6], rules=SamplingRules(prompt_logprobs=1))
        assert bench.report(bench.plan(), prompt_logprobs={0: self.block(2, 3, 4, 5)}) == []
        (output,) = bench.report(bench.plan(), prompt_logprobs={0: self.block(6)})
        assert [position.token_ids[0] for position in output.prompt_logprobs] == [2, 3, 4, 5, 6]
        (output,) = bench.report(bench.plan())
        assert output.prompt_logprobs is None

    def test_of_the_prompt_after_a_preemption_within_it(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False, "long_prefill_token_threshold": 1})
        bench.add("a", 3, max_tokens=12)
        bench.add("b", list(range(1, 13)), max_tokens=1, rules=SamplingRules(prompt_logprobs=0))
        preempted = 0
        while bench.scheduler.num_unfinished:
            plan = bench.plan()
            blocks = {}
            row = next((request.row for request in bench.scheduler.running if request.request_id == "b"), -1)
            for index in np.flatnonzero(plan.rows == row).tolist():
                first, count = int(plan.context[index]), counts(plan)[index]
                blocks[index] = self.block(*range(first + 2, min(first + count, 11) + 2))
            bench.report(plan, prompt_logprobs=blocks)
            preempted = bench.scheduler.stats().preemptions
        assert preempted > 0
        (output,) = bench.outputs["b"]
        assert [position.token_ids[0] for position in output.prompt_logprobs] == list(range(2, 13))


def test_results_must_come_in_order():
    bench = Bench()
    bench.add("a", 3)
    bench.plan()
    two = bench.plan()
    with pytest.raises(RuntimeError, match="expected step 0"):
        bench.report(two)


class TestSplitBudget:
    """`split_budget` of rows with so many tokens to compute, in order."""

    def split(self, wants: list[int], budget: int, costs: Sequence[int] = (), **settings) -> dict[int, int]:
        batch, rows = RunningBatch(len(wants)), np.arange(len(wants), dtype=np.int32)
        batch.token_cost[:] = costs or 1
        batch.computed[:] = 7
        batch.total[:] = batch.computed + wants
        batch.limit[:] = 50
        limits = Limits(max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=8, block_size=4, **settings)
        split = split_budget(batch, rows, limits)
        return dict(zip(split.rows.tolist(), split.tokens.tolist()))

    @each_row(
        ("wants", "budget", "split"),
        [
            ([1, 1], 9, {0: 1, 1: 1}),
            ([2, 2], 9, {0: 2, 1: 2}),
            ([2, 2], 3, {1: 1, 0: 2}),
            ([5, 1, 5, 1], 9, {1: 1, 3: 1, 0: 5, 2: 2}),
            ([5, 1, 5, 5], 7, {1: 1, 2: 1, 0: 5}),
            ([5, 5, 5], 5, {0: 5}),
            ([0, 3, 0, 1], 9, {3: 1, 1: 3}),
        ],
    )
    def test_single_tokens_first_then_chunks_in_order(self, wants, budget, split):
        assert list(self.split(wants, budget).items()) == list(split.items())

    def test_rows_at_their_limit_get_nothing(self):
        batch = RunningBatch(3)
        batch.token_cost[:] = 1
        batch.computed[:], batch.total[:], batch.limit[:] = 8, 9, [8, 9, 10]
        limits = Limits(max_model_len=64, max_num_batched_tokens=9, max_num_seqs=8, block_size=4)
        split = split_budget(batch, np.arange(3, dtype=np.int32), limits)
        assert split.tokens[split.tokens > 0].tolist() == [1]
        assert split.rows[split.tokens > 0].tolist() == [2]

    def test_a_threshold_cuts_chunks(self):
        assert self.split([9, 1, 2], 20, long_prefill_token_threshold=3) == {1: 1, 0: 3, 2: 2}

    def test_chunks_end_at_borders(self):
        batch = RunningBatch(2)
        batch.token_cost[:] = 1
        batch.computed[:], batch.total[:], batch.limit[:] = 7, 30, 50
        batch.next_border[0] = 12
        limits = Limits(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=8, block_size=4)
        assert split_budget(batch, np.arange(2, dtype=np.int32), limits).tokens.tolist() == [5, 23]

    @each_row(
        ("wants", "costs", "budget", "split"),
        [
            ([20], [2], 16, {0: 8}),
            ([6, 6], [2, 1], 16, {0: 6, 1: 4}),
            ([6, 6], [1, 2], 16, {0: 6, 1: 5}),
            ([1, 9], [64, 64], 16, {0: 1, 1: 1}),
            ([9, 9], [64, 1], 16, {0: 1}),
        ],
    )
    def test_tokens_that_cost_more_leave_less(self, wants, costs, budget, split):
        assert self.split(wants, budget, costs) == split

    def test_prompts_with_logprobs_start_with_shorter_chunks(self):
        bench = Bench(limits={"max_num_batched_tokens": 16, "max_model_len": 64})
        for name, logprobs in (("a", 0), ("b", None), ("c", -1)):
            rules = SamplingRules(prompt_logprobs=logprobs)
            asked = EngineRequest(request_id=name, prompt_token_ids=[ord(name)] * 20, rules=rules, max_tokens=2)
            bench.scheduler.add(asked)
            plan = bench.plan()
            assert counts(plan) == {"a": [8], "b": [16], "c": [1]}[name]
            bench.scheduler.abort([name])
            bench.report(plan, 5)

    def test_the_first_chunk(self):
        def limits(**settings) -> Limits:
            return Limits(max_model_len=16, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, **settings)

        assert [first_chunk(6, left, limits()) for left in (5, 6, 7)] == [5, 6, 6]
        assert [first_chunk(6, left, limits(long_prefill_token_threshold=4)) for left in (3, 7)] == [3, 4]
        assert [first_chunk(6, left, limits(chunked_prefill=False)) for left in (5, 6, 7)] == [0, 6, 6]
        assert [first_chunk(6, left, limits(), cost=2) for left in (1, 5, 12, 16)] == [1, 2, 6, 6]

    def test_rows_with_one_token_go_first(self):
        first = decode_first(np.array([4, 5, 6, 7], np.int32), np.array([2, 1, 3, 1], np.int32))
        assert (first.rows.tolist(), first.tokens.tolist()) == ([5, 7, 4, 6], [1, 1, 2, 3])

    def test_a_prompt_starts_with_the_one_token_that_is_left(self):
        bench = Bench(limits={"max_num_batched_tokens": 2, "max_num_seqs": 2})
        bench.add("a", 1)
        bench.step()
        bench.add("b", 5)
        assert counts(bench.step()) == [1, 1]
        assert bench.running == "ab"


class TestLimits:
    def test_the_largest_prompt_that_fits_the_pool(self):
        bench = Bench(num_blocks=3)
        with pytest.raises(RequestError, match="8 tokens do not fit the KV cache of 2 blocks of 4 tokens"):
            bench.add("a", 8)
        bench.add("a", 7)
        bench.step()
        bench.step(8)
        assert [output.finish_reason for output in bench.outputs["a"]] == [None, "length"]

    def test_settings_of_a_custom_scheduler(self):
        bench = Bench()
        assert bench.scheduler.settings == {}
        assert Scheduler(bench.scheduler.limits, bench.scheduler.kv, {"a": 1}).settings == {"a": 1}

    def test_capacity_is_that_of_the_blocks(self):
        bench = Bench()
        bench.add("a", 3)
        bench.step()
        assert bench.scheduler._batch.capacity[0] == 4
        bench.step()
        bench.step()
        assert bench.scheduler._batch.capacity[0] == 8
        assert bench.scheduler.stats().last_step_tokens == 0


class MaskState:
    """Allows the newest token plus one, which no one knows while a token is in flight."""

    consults_grammar = is_stale = False

    def __init__(self, depends: bool = True, last: int = -1, bad: int = -1) -> None:
        self.bits: np.ndarray | None = np.array([1], np.uint32)
        self.error: str | None = None
        self.finished = False
        self.accepted: list[int] = []
        self._depends, self._last, self._bad = depends, last, bad

    def depends_on(self, unknown: int) -> bool:
        return self._depends and unknown > 0

    def accept(self, token: int) -> None:
        self.accepted.append(token)
        self.finished = token == self._last
        self.error = "no token fits" if token == self._bad else None

    def release(self) -> None:
        pass

    def refresh(self, grammar: None, outputs: list[int]) -> None:
        assert not self.finished
        assert self.error is None
        self.bits = np.array([len(outputs) + 100 * outputs[-1]], np.uint32)


class TestMasks:
    def add(self, bench: Bench, name: str, state: MaskState, prompt: int = 3, **settings) -> None:
        settings = {"rules": SamplingRules(), "stop_token_ids": frozenset({EOS}), "max_tokens": 8} | settings
        asked = EngineRequest(request_id=name, prompt_token_ids=[ord(name)] * prompt, **settings)
        bench.scheduler.add(asked, state)

    def masks(self, bench: Bench, plan: StepPlan) -> dict[int, list[int]]:
        """Return what a backend is handed: bits by sequence."""
        masks = bench.scheduler.token_masks(plan)
        assert masks is not None
        return dict(zip(masks.sequences.tolist(), masks.bits.tolist(), strict=True))

    def test_a_plan_names_the_rows_that_sample_under_a_mask(self):
        bench = Bench(limits={"max_num_batched_tokens": 8})
        bench.add("a", 1)
        self.add(bench, "b", MaskState())
        free = MaskState()
        free.bits = None
        self.add(bench, "c", free, 2)
        self.add(bench, "d", MaskState(), 9)
        plan = bench.plan()
        assert (counts(plan), plan.samples.tolist()) == ([1, 3, 2, 2], [True, True, True, False])
        assert plan.masked.tolist() == [1]
        assert self.masks(bench, plan) == {1: [1]}
        bench.report(plan, 5)
        plan = bench.plan()
        assert plan.masked.tolist() == [1, 2]
        assert self.masks(bench, plan) == {1: [501], 2: [501]}

    def test_masked_rows_are_planned_ahead_and_their_masks_follow(self):
        bench = Bench(limits={"max_num_seqs": 8, "max_num_batched_tokens": 64})
        bench.add("a", 1)
        for name in "xyz":
            self.add(bench, name, MaskState())
        one = bench.plan()
        assert self.masks(bench, one) == {1: [1], 2: [1], 3: [1]}
        two = bench.plan()
        assert (two.token_ids.tolist(), two.masked.tolist()) == ([PREVIOUS] * 4, [1, 2, 3])
        with pytest.raises(RuntimeError, match="the token masks of step 1 depend on the result of step 0"):
            bench.scheduler.token_masks(two)
        bench.report(one, [5, 6, 7, 8])
        assert self.masks(bench, two) == {1: [601], 2: [701], 3: [801]}

    def test_a_row_that_has_no_mask_yet_is_named_because_it_may_get_one(self):
        bench = Bench()
        states = MaskState(), MaskState(depends=False)
        for name, state in zip("xy", states):
            state.bits = None
            self.add(bench, name, state)
        one, two = bench.plan(), bench.plan()
        assert one.masked is None
        assert bench.scheduler.token_masks(one) is None
        assert two.masked.tolist() == [0]

    def test_rows_that_ended_meanwhile_may_sample_any_token(self):
        bench = Bench()
        self.add(bench, "a", MaskState(last=9))
        self.add(bench, "b", MaskState(bad=9))
        self.add(bench, "c", MaskState())
        self.add(bench, "d", MaskState())
        one, two = bench.plan(), bench.plan()
        assert two.masked.tolist() == [0, 1, 2, 3]
        bench.report(one, 9)
        bench.scheduler.abort(["d"])
        assert self.masks(bench, two) == {2: [901]}
        bench.scheduler.abort(["c"])
        assert self.masks(bench, two) == {}
        bench.report(two, 3)
        assert [len(bench.outputs[name]) for name in "abcd"] == [1, 1, 1, 1]

    def test_a_preempted_row_keeps_its_mask(self):
        """Its token counts: it is not sampled again."""
        bench = Bench()
        self.add(bench, "a", MaskState())
        one, two = bench.plan(), bench.plan()
        bench.scheduler._preempt(bench.scheduler.running[-1])
        bench.report(one, 5)
        assert self.masks(bench, two) == {0: [501]}
        bench.report(two, 6)
        assert bench.outputs["a"][-1].new_token_ids == [6]

    def test_a_mask_that_is_known_ahead_is_named(self):
        bench = Bench()
        self.add(bench, "x", MaskState(depends=False))
        one, two = bench.plan(), bench.plan()
        assert (one.masked.tolist(), two.masked.tolist()) == ([0], [0])

    def test_states_follow_the_tokens_that_do_not_end_the_request(self):
        bench = Bench()
        stopped, short, aborted, free = MaskState(), MaskState(), MaskState(), MaskState()
        self.add(bench, "a", stopped)
        self.add(bench, "b", short, max_tokens=2)
        self.add(bench, "c", aborted)
        self.add(bench, "d", free)
        bench.step([5, 5, 5, 5])
        plan = bench.plan()
        bench.scheduler.abort(["c"])
        bench.report(plan, [EOS, 6, 7, 8])
        states = (stopped, short, aborted, free)
        assert [state.accepted for state in states] == [[5], [5], [5], [5, 8]]
        assert [bench.outputs[name][-1].finish_reason for name in "abd"] == ["stop", "length", None]

    def test_token_zero_is_a_token(self):
        bench, state = Bench(), MaskState()
        self.add(bench, "a", state, stop_token_ids=frozenset())
        bench.step(0)
        assert state.accepted == [0]

    def test_a_state_can_end_its_request(self):
        bench = Bench()
        self.add(bench, "a", MaskState(last=9))
        self.add(bench, "b", MaskState(bad=9))
        self.add(bench, "c", MaskState())
        bench.step(9)
        a, b, c = (bench.outputs[name][-1] for name in "abc")
        assert [each.finish_reason for each in (a, b, c)] == ["stop", "error", None]
        assert [each.new_token_ids for each in (a, b, c)] == [[9], [9], [9]]
        assert (a.stop_reason, b.error) == (None, ("structured_outputs", "structured_outputs: no token fits"))
        assert bench.running == "c"
        bench.scheduler.check_integrity()

    def test_after_the_last_request_with_a_mask_no_row_is_masked(self):
        bench = Bench()
        bench.add("b", 1)
        self.add(bench, "a", MaskState())
        bench.step()
        plan = bench.plan()
        assert plan.masked.tolist() == [1]
        bench.scheduler.abort(["a"])
        bench.report(plan)
        assert (bench.plan().masked, bench.plan().masked) == (None, None)
        assert bench.scheduler.masks.num_requests == 0


class TestMedia:
    """Items of two bytes per row; rows are given from 0 on."""

    def add(self, bench: Bench, name: str, prompt: list[int], rows: bytes) -> None:
        rules = SamplingRules()
        media = row_items(prompt, rows)
        asked = EngineRequest(request_id=name, prompt_token_ids=prompt, rules=rules, max_tokens=2, media=media)
        bench.scheduler.add(asked)

    def encoded(self, plan: StepPlan) -> list[tuple[bytes, list[int]]]:
        return [(encode.item.payload, encode.rows.tolist()) for encode in plan.encodes]

    def test_a_plan_encodes_the_items_of_its_tokens_and_names_their_rows(self):
        bench = Bench(limits={"max_num_batched_tokens": 5, "media_rows": 8})
        bench.add("t", 1, max_tokens=9)
        self.add(bench, "e", [EMBEDDED, 7, EMBEDDED, EMBEDDED, 8, EMBEDDED], b"aabbccdd")
        one = bench.step()
        assert counts(one) == [1, 4]
        assert [payload for payload, _ in self.encoded(one)] == [b"aa", b"bbcc"]
        (a,), (b, c) = (rows for _, rows in self.encoded(one))
        assert one.token_ids.tolist()[1:] == [FIRST_ROW + a, 7, FIRST_ROW + b, FIRST_ROW + c]
        two = bench.step()
        assert counts(two) == [1, 2]
        ((_, (d,)),) = self.encoded(two)
        assert two.token_ids.tolist()[1:] == [8, FIRST_ROW + d]
        assert bench.step().encodes == ()
        assert bench.outputs["e"][-1].finish_reason == "length"
        assert bench.scheduler._media.num_running == 0
        bench.scheduler.check_integrity()

    def test_equal_items_of_several_requests_are_encoded_once(self):
        bench = Bench(limits={"media_rows": 4})
        self.add(bench, "e", [EMBEDDED, 7, EMBEDDED], b"aabb")
        self.add(bench, "f", [EMBEDDED, EMBEDDED, 5, EMBEDDED], b"ccddaa")
        plan = bench.step()
        rows = dict(self.encoded(plan))
        assert sorted(rows) == [b"aa", b"bb", b"ccdd"]
        (a,), (b,), (c, d) = (rows[name] for name in (b"aa", b"bb", b"ccdd"))
        assert plan.token_ids.tolist() == [FIRST_ROW + row if row < 4 else row for row in (a, 7, b, c, d, 5, a)]

    def test_a_chunk_ends_before_an_item_without_rows(self):
        """And goes on when another sequence has given some back; an item that is known is not encoded again."""
        bench = Bench(limits={"media_rows": 3})
        self.add(bench, "e", [EMBEDDED, EMBEDDED, 7, 8], b"aabb")
        self.add(bench, "f", [5, EMBEDDED, EMBEDDED, 6], b"ccdd")
        self.add(bench, "g", [EMBEDDED, EMBEDDED, 9], b"aabb")
        assert counts(bench.step()) == [1, 4, 3]
        plan = bench.step()
        assert counts(plan) == [1, 1, 3]
        assert [payload for payload, _ in self.encoded(plan)] == [b"ccdd"]
        bench.scheduler.check_integrity()

    def test_an_item_larger_than_the_cache_is_refused(self):
        bench = Bench(limits={"media_rows": 1})
        with pytest.raises(RequestError, match="a media item has 2 rows, the engine has room for 1"):
            self.add(bench, "e", [EMBEDDED, EMBEDDED], b"aabb")


class TestStats:
    def test_queries_and_hits_of_the_prefix_cache(self):
        bench = Bench()
        bench.add("a", list(range(1, 10)), max_tokens=1)
        bench.step()
        bench.add("b", list(range(1, 12)), max_tokens=1)
        bench.add("c", list(range(1, 12)), max_tokens=1, skip_reading_prefix_cache=True)
        bench.step()
        stats = bench.scheduler.stats(3)
        assert (stats.prefix_queries, stats.prefix_hits) == (9 + 11, 8)
        assert (stats.steps, stats.last_step_tokens, stats.kv_blocks_total) == (2, 3, 64)
        assert [bench.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 8, 0]

    def test_a_step_has_prompt_tokens_and_generated_tokens(self):
        """Chunks, a last chunk of one token beside a generating request, and tokens that nobody reads."""
        bench = Bench()
        bench.add("a", 3)
        tokens = [bench.scheduler.update(plan, result_of(plan)).stats.last_step_tokens for plan in [bench.plan()]]
        bench.add("b", 31)
        for _ in range(4):
            plan = bench.plan()
            tokens.append(bench.scheduler.update(plan, result_of(plan)).stats.last_step_tokens)
        assert tokens == [3 + 1, 15 + 1, 15 + 1, 1 + 2, 2]
        plan = bench.plan()
        bench.scheduler.abort(["a"])
        assert bench.scheduler.update(plan, result_of(plan)).stats.last_step_tokens == 1

    def test_recomputed_tokens_count_as_prompt_tokens(self):
        bench = Bench(num_blocks=6, limits={"prefix_caching": False})
        bench.add("a", [1] * 7)
        bench.add("b", [2] * 7)
        total = prompts = 0
        while bench.scheduler.num_unfinished:
            plan = bench.plan()
            prompts += sum(len(start.token_ids) for start in plan.starts)
            total += bench.scheduler.update(plan, result_of(plan)).stats.last_step_tokens
        assert prompts > 7 + 7
        assert total == prompts + 8 + 8

    def test_without_a_prefix_cache_there_are_no_queries(self):
        bench = Bench(limits={"prefix_caching": False})
        bench.add("a", 9)
        bench.step()
        assert bench.scheduler.stats().prefix_queries == 0

    def test_a_preempted_request_is_counted_once(self):
        bench = Bench(num_blocks=6)
        bench.add("a", [1] * 7)
        bench.add("b", [2] * 7)
        while bench.scheduler.num_unfinished:
            bench.step()
        stats = bench.scheduler.stats()
        assert (stats.preemptions, stats.prefix_queries, stats.prefix_hits) == (1, 14, 0)

    def test_recompiles_add_up(self):
        bench = Bench()
        bench.add("a", 3)
        for _ in range(2):
            plan = bench.plan()
            bench.scheduler.update(plan, StepResult(plan.step, np.array([5], np.int32), recompiles=3))
        assert bench.scheduler.stats().recompiles == 6


class TestIntegrity:
    def test_rows_requests_and_blocks_add_up(self):
        bench = Bench(limits={"max_num_seqs": 1})
        bench.scheduler.check_integrity()
        bench.add("a", 3)
        bench.add("b", 3)
        bench.step()
        bench.scheduler.check_integrity()

    def test_a_pool_that_does_not_add_up_is_seen(self):
        bench = Bench()
        bench.add("a", 3)
        bench.step()
        bench.scheduler.kv.pools[0].num_free += 1
        with pytest.raises(RuntimeError, match="counted free"):
            bench.scheduler.check_integrity()

    def test_lost_rows_requests_and_blocks_are_seen(self):
        bench = Bench()
        bench.add("a", 3)
        bench.step()
        (request,) = bench.scheduler.running
        bench.scheduler.running.clear()
        with pytest.raises(RuntimeError, match="3 rows are free with 0 requests running"):
            bench.scheduler.check_integrity()
        bench.scheduler._batch.release(request)
        with pytest.raises(RuntimeError, match="1 requests, 0 running, 0 waiting"):
            bench.scheduler.check_integrity()
        bench.scheduler.requests.clear()
        with pytest.raises(RuntimeError, match="nothing runs, yet only 63 blocks are free"):
            bench.scheduler.check_integrity()


def test_a_chunk_of_two_tokens_enters_its_page_into_the_cache():
    bench = Bench(limits={"max_num_batched_tokens": 7, "long_prefill_token_threshold": 2})
    bench.add("a", [1, 2, 3, 4, 5, 6], max_tokens=2)
    bench.step()
    bench.add("b", [1, 2, 3, 4, 9], max_tokens=1)
    assert sorted(bench.plan().context.tolist()) == [2, 4]
