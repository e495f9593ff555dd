"""The step loop of pooling models, over a backend whose vectors contain the tokens that they pool."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from fakes import FakeBackend, full_layout
from support.suite.rows import each_row

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineOutput, EngineRequest, StepOutputs, pooling_request
from pagoda.common.engine.pooling.scheduler import pooling_core
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan, PoolResult
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import RequestError
from pagoda.common.models.spec import TokenSelection

EMBED = PoolingRules(task="embed", use_activation=True)


class FakePooling:
    """Records the plans; the vector of a prompt is its tokens and their types."""

    def __init__(self) -> None:
        self.plans: list[PoolPlan] = []

    def execute(self, plan: PoolPlan) -> Future[PoolResult]:
        self.plans.append(plan)
        types = plan.token_types if plan.token_types is not None else np.zeros(plan.num_tokens, np.int32)
        both = np.stack([plan.token_ids, types], 1).astype(np.float32)
        future: Future[PoolResult] = Future()
        future.set_result(PoolResult(tuple(np.split(both, plan.query_start[1:-1]))))
        return future


def core(*, tokens: int = 10, seqs: int = 4, length: int = 30, **limits) -> tuple[EngineCore, FakePooling]:
    backend = FakePooling()
    made = Limits(max_model_len=length, max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=1, **limits)
    return pooling_core(backend, made, ("embed", "token_embed")), backend


def ask(name: str, length: int = 3, first: int = 1, rules: PoolingRules = EMBED, **more) -> EngineRequest:
    return pooling_request(name, list(range(first, first + length)), rules, **more)


def drain(engine: EngineCore) -> list[EngineOutput]:
    results: list[EngineOutput] = []
    while engine.has_work:
        results += engine.step().outputs
    return results


def lengths(backend: FakePooling) -> list[list[int]]:
    return [np.diff(plan.query_start).tolist() for plan in backend.plans]


def test_outputs_carry_the_schedule_time():
    times = iter([1.0, 2.0, 3.0])
    engine = pooling_core(FakePooling(), core(seqs=2)[0].limits, ("embed",), clock=lambda: next(times))
    for name in "abcde":
        engine.add_request(ask(name))
    results = drain(engine)
    assert [(output.request_id, output.scheduled) for output in results] == [
        *(("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0), ("e", 3.0)),
    ]


def test_the_parts_of_a_task_are_joined():
    """Each part is a step's work of its own, for prompts up to the longest."""
    backend = FakePooling()
    limits = Limits(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=4, block_size=1)
    engine = pooling_core(backend, limits, ("embed", "token_classify", "embed&token_classify"))
    selection = TokenSelection(skip_first=1)
    joined = PoolingRules(task="embed&token_classify", use_activation=True, selection=selection)
    engine.add_request(ask("joined", 8, rules=joined))
    engine.add_request(ask("alone", 3))
    outputs = {output.request_id: output.pooled.array for output in drain(engine)}
    assert outputs["alone"].shape == (3, 2)
    assert outputs["joined"].reshape(-1, 2)[:, 0].tolist() == [*range(1, 9), *range(2, 9)]
    tasks = [[rules.task for rules in plan.rules] for plan in backend.plans]
    assert tasks == [["embed"], ["embed"], ["token_classify"]]  # the second step is planned before the first has ended
    engine.check_integrity()


def test_a_request_between_its_parts_is_aborted():
    engine, rules = core()[0], PoolingRules(task="embed&token_classify", use_activation=True)
    engine = pooling_core(FakePooling(), engine.limits, ("embed&token_classify",))
    engine.add_request(ask("a", rules=rules))
    engine.step()
    engine.abort(["a"])
    assert drain(engine) == []
    engine.add_request(ask("a", 2, rules=rules))
    (output,) = drain(engine)
    assert output.pooled.array.shape == (8,)


def test_every_prompt_gets_its_vector_once():
    engine, _ = core()
    for index in range(7):
        engine.add_request(ask(str(index), 1 + index, first=10 * index))
    results = drain(engine)
    assert [output.request_id for output in results] == [str(index) for index in range(7)]
    for index, output in enumerate(results):
        assert output.finish_reason == "stop"
        assert output.new_token_ids == []
        assert output.pooled is not None
        assert output.pooled.array[:, 0].tolist() == list(range(10 * index, 11 * index + 1))
    engine.check_integrity()


def test_steps_fill_the_token_budget():
    engine, backend = core(tokens=10, seqs=3)
    for index, length in enumerate((4, 4, 4, 1, 1, 1, 1, 9)):
        engine.add_request(ask(str(index), length))
    drain(engine)
    assert lengths(backend) == [[4, 4], [4, 1, 1], [1, 1], [9]]


def test_a_prompt_over_the_budget_has_its_own_step():
    engine, backend = core(tokens=10)
    for index, length in enumerate((3, 25, 3)):
        engine.add_request(ask(str(index), length))
    assert len(drain(engine)) == 3
    assert lengths(backend) == [[3], [25], [3]]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c"]), ("priority", ["b", "c", "a"])])
def test_queue_order_by_policy(policy: str, order: list[str]):
    engine, _ = core(seqs=1, policy=policy)
    for name, priority in (("a", 2), ("b", 1), ("c", 1)):
        engine.add_request(ask(name, priority=priority))
    assert [output.request_id for output in drain(engine)] == order


@pytest.mark.parametrize(("ahead", "started"), [(True, 2), (False, 1)])
def test_the_next_step_is_started_while_one_runs(ahead: bool, started: int):
    engine, backend = core(seqs=1, async_scheduling=ahead)
    for name in "abc":
        engine.add_request(ask(name))
    engine.step()
    assert len(backend.plans) == started


def test_aborted_requests_have_no_output():
    engine, backend = core(seqs=1)
    for name in "abcd":
        engine.add_request(ask(name))
    first = engine.step().outputs  # b is in a step by now
    engine.abort(["b", "c", "nobody"])
    engine.check_integrity()
    assert [output.request_id for output in first + drain(engine)] == ["a", "d"]
    assert len(backend.plans) == 3
    engine.check_integrity()


def test_a_reused_id_gets_its_own_result():
    engine, _ = core(seqs=1)
    for name in "ab":
        engine.add_request(ask(name))
    engine.step()
    engine.abort(["b"])  # The step of b is under way.
    engine.add_request(ask("b", first=50))
    results = drain(engine)
    assert [output.pooled.array[0, 0] for output in results if output.pooled] == [50]


def test_token_types_begin_with_the_second_text():
    engine, backend = core()
    engine.add_request(ask("alone", 2))
    engine.add_request(ask("pair", 4, rules=PoolingRules(task="embed", use_activation=True, second_text=3)))
    types = [output.pooled.array[:, 1].tolist() for output in drain(engine) if output.pooled]
    assert types == [[0, 0], [0, 0, 0, 1]]
    engine.add_request(ask("alone", 2))
    drain(engine)
    assert backend.plans[-1].token_types is None


def test_stats():
    engine, _ = core(seqs=1, async_scheduling=False)
    for name in "abc":
        engine.add_request(ask(name, 5))
    assert (engine.stats.running, engine.stats.waiting, engine.stats.steps) == (0, 3, 0)
    after: StepOutputs = engine.step()
    assert (after.stats.running, after.stats.waiting, after.stats.steps) == (0, 2, 1)
    assert after.stats.last_step_tokens == 5
    assert engine.reset_prefix_cache()


@each_row(
    ("request_", "field", "words"),
    [
        (ask("x", 31), "prompt", "31 tokens, the model takes 30"),
        (ask("x", 0), "prompt", "empty"),
        (ask("x", rules=PoolingRules(task="classify", use_activation=True)), "task", "embed, token_embed"),
        (ask("taken"), "request_id", "already in the engine"),
        (
            EngineRequest(request_id="x", prompt_token_ids=[1], rules=SamplingRules(), max_tokens=1),
            "model",
            "generates no text",
        ),
    ],
)
def test_requests_that_can_never_run_are_refused(request_: EngineRequest, field: str, words: str):
    engine, _ = core()
    engine.add_request(ask("taken"))
    with pytest.raises(RequestError, match=words) as refused:
        engine.add_request(request_)
    assert refused.value.field == field
    assert len(drain(engine)) == 1


def test_a_model_that_generates_refuses_to_pool():
    layout = full_layout(4)
    limits = Limits(max_model_len=16, max_num_batched_tokens=16, max_num_seqs=2, block_size=4)
    engine = generation_core(FakeBackend(layout, num_blocks=9), layout, limits, (9,))
    with pytest.raises(RequestError, match="--runner pooling"):
        engine.add_request(ask("x"))
    assert not engine.has_work
