"""Rows go to the key and the request that run the fewest sequences; a starved one takes a row from the largest."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fakes import full_layout

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.fair_queue import FairQueue
from pagoda.common.engine.scheduling.request import Request
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import StepResult

ROWS = 8


def engine_request(name: str, owner: str = "", group: str = "", prompt: int = 3, tokens: int = 1000) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(range(prompt)),
        rules=SamplingRules(),
        max_tokens=tokens,
        owner=owner,
        group=group,
    )


def waiting(name: str, rank: int, owner: str = "", group: str = "") -> Request:
    return Request.of(engine_request(name, owner, group), limit=9, rank=(rank,))


def started(queue: FairQueue) -> str:
    """Start the next sequence and return its name."""
    request = queue.pop()
    queue.started(request)
    return request.request_id


def test_single_sequences_of_one_key_are_served_as_they_came() -> None:
    queue = FairQueue()
    for rank, name in enumerate("abcde"):
        queue.push(waiting(name, rank))
    queue.push_front(waiting("z", -1))
    assert queue.remove("c") is not None
    assert queue.remove("c") is None
    assert [started(queue) for _ in range(len(queue))] == list("zabde")
    for call in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            call()


def test_requests_of_many_sequences_take_turns_with_others() -> None:
    queue = FairQueue()
    for rank in range(4):
        queue.push(waiting(f"n{rank}", rank, group="n"))
    queue.push(waiting("a", 8))
    queue.push(waiting("b", 9))
    assert [started(queue) for _ in range(6)] == ["n0", "a", "b", "n1", "n2", "n3"]


def test_keys_take_turns() -> None:
    queue = FairQueue()
    for rank in range(4):
        queue.push(waiting(f"x{rank}", rank, owner="x"))
    for rank in range(2):
        queue.push(waiting(f"y{rank}", 10 + rank, owner="y"))
    assert [started(queue) for _ in range(6)] == ["x0", "y0", "x1", "y1", "x2", "x3"]


def test_order_is_that_of_a_plain_search() -> None:
    """Against the definition, over random pushes, starts, ends and removals; nothing is kept of what has ended."""
    draw = random.Random(0)
    queue, waits, runs, served, rows = FairQueue(), [], [], {}, 0
    for rank in range(4000):
        action = draw.random()
        if action < 0.4:
            request = waiting(str(rank), rank, draw.choice("xyz"), draw.choice(["", "g", "h"]))
            queue.push(request)
            waits.append(request)
        elif action < 0.7 and waits:
            running = lambda each, name: sum(getattr(r, name) == getattr(each, name) for r in runs)  # noqa: E731
            key = lambda each: (running(each, "owner"), served.get(each.owner, 0))  # noqa: B023, E731
            owner = min(waits, key=key).owner
            own = [each for each in waits if each.owner == owner]
            mine = [r for r in runs if r.owner == owner]
            want = min(own, key=lambda each: (sum(r.group == each.group for r in mine), each.rank))
            assert queue.peek() is want
            assert started(queue) == want.request_id
            rows += 1
            served[owner] = rows
            waits.remove(want)
            runs.append(want)
        elif action < 0.95 and runs:
            request = runs.pop(draw.randrange(len(runs)))
            queue.stopped(request)
            if not any(each.owner == request.owner for each in waits + runs):
                served.pop(request.owner)
        elif waits:
            request = waits.pop(draw.randrange(len(waits)))
            assert queue.remove(request.request_id) is request
            if not any(each.owner == request.owner for each in waits + runs):
                served.pop(request.owner, None)
        assert len(queue) == len(waits)
    for request in runs:
        queue.stopped(request)
    for request in waits:
        queue.remove(request.request_id)
    assert not queue._owners


class Steps:
    """A scheduler, stepped with token 7."""

    def __init__(self, blocks: int = 1000, max_model_len: int = 2048) -> None:
        limits = Limits(max_model_len=max_model_len, max_num_batched_tokens=64, max_num_seqs=ROWS, block_size=4)
        kv = KvManager(full_layout(4), (blocks,), max_num_seqs=ROWS, max_model_len=max_model_len, max_step_tokens=64)
        self.scheduler = Scheduler(limits, kv)

    def step(self) -> dict[str, int]:
        """Run a step; return the tokens by request."""
        plan = self.scheduler.schedule()
        assert plan is not None
        tokens = np.where(plan.samples, 7, -1).astype(np.int32)
        outputs = self.scheduler.update(plan, StepResult(plan.step, tokens)).outputs
        self.scheduler.check_integrity()
        return {output.request_id: len(output.new_token_ids) for output in outputs}

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


def test_request_of_many_sequences_leaves_rows_to_others() -> None:
    """n = 16384 took all rows until its sequences had ended."""
    steps = Steps()
    for index in range(100):
        steps.scheduler.add(engine_request(f"n{index}", group="n"))
    steps.step()
    assert len(steps.running) == ROWS
    steps.scheduler.add(engine_request("a", tokens=5))
    steps.scheduler.add(engine_request("b", tokens=5))
    assert "a" in steps.step(), "it runs in the next step"
    assert {"a", "b"} <= set(steps.step())
    for _ in range(5):
        steps.step()
    assert not {"a", "b"} & set(steps.running)
    assert len(steps.running) == ROWS, "their rows went back"
    assert steps.scheduler.stats().preemptions == 2


def test_key_with_many_requests_leaves_rows_to_another() -> None:
    steps = Steps()
    for index in range(100):
        steps.scheduler.add(engine_request(f"x{index}", owner="x"))
    steps.step()
    for index in range(100):
        steps.scheduler.add(engine_request(f"y{index}", owner="y"))
    for _ in range(10):
        steps.step()
    assert sorted(name[0] for name in steps.running) == ["x"] * (ROWS // 2) + ["y"] * (ROWS // 2)
    assert steps.scheduler.stats().preemptions == ROWS // 2, "no more than the rows that changed hands"


def test_nothing_is_preempted_among_single_requests_of_one_key() -> None:
    steps = Steps()
    for index in range(3 * ROWS):
        steps.scheduler.add(engine_request(str(index)))
    for _ in range(20):
        steps.step()
    assert steps.running == [str(index) for index in range(ROWS)]
    assert steps.scheduler.stats().preemptions == 0


def test_starved_request_gets_blocks() -> None:
    """A request of many long sequences holds all blocks of the cache, though rows are free."""
    steps = Steps(blocks=61, max_model_len=128)
    for index in range(4):
        steps.scheduler.add(engine_request(f"n{index}", group="n", prompt=60, tokens=60))
    for _ in range(8):
        steps.step()
    steps.scheduler.add(engine_request("a", prompt=40, tokens=2))
    outputs: set[str] = set()
    for _ in range(4):
        outputs |= steps.step().keys()
    assert "a" in outputs


def test_sequences_of_a_request_share_their_prompt() -> None:
    steps = Steps()
    first = engine_request("a", group="g")
    for index in range(5):
        steps.scheduler.add(replace(first, request_id=f"s{index}"))
    prompts = {id(request.prompt) for request in steps.scheduler.requests.values()}
    assert len(prompts) == 1
