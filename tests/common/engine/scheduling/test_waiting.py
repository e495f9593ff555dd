"""Both waiting queues."""

from __future__ import annotations

import pytest

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import FcfsQueue, PriorityQueue, Request


def request(name: str, *rank: float) -> Request:
    engine_request = EngineRequest(request_id=name, prompt_token_ids=[1], rules=SamplingRules(), max_tokens=1)
    return Request.of(engine_request, limit=2, rank=rank)


def drain(queue: FcfsQueue | PriorityQueue) -> str:
    return "".join(queue.pop().request_id for _ in range(len(queue)))


def test_fcfs_order_with_preempted_requests_first():
    queue = FcfsQueue()
    for name in "abc":
        queue.push(request(name))
    queue.push_front(request("z"))
    assert queue.peek().request_id == "z"
    assert drain(queue) == "zabc"


def test_priority_order_by_rank():
    queue = PriorityQueue()
    for name, rank in (("late", (1, 5.0, 1)), ("low", (2, 0.0, 2)), ("early", (1, 1.0, 3)), ("first", (0, 9.0, 4))):
        queue.push(request(name, *rank))
    queue.push_front(request("back", 1, 2.0, 5))
    assert [queue.pop().request_id for _ in range(5)] == ["first", "early", "back", "late", "low"]


@pytest.mark.parametrize("queue", [FcfsQueue(), PriorityQueue()], ids=["fcfs", "priority"])
def test_remove_and_empty_queues(queue):
    for number, name in enumerate("abc"):
        queue.push(request(name, number))
    assert queue.remove("a").request_id == "a"
    assert queue.remove("a") is None
    assert len(queue) == 2
    queue.push(request("a", 9))
    assert drain(queue) == "bca"
    for call in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            call()
