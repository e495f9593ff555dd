"""Both lines, in order."""

from __future__ import annotations

import pytest

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.request import FcfsQueue, PriorityQueue, Request
from pagoda.common.engine.sampling import SamplingRules


def request(name: str, *rank: float) -> Request:
    asked = EngineRequest(request_id=name, prompt_token_ids=[1], rules=SamplingRules(), max_tokens=1)
    return Request.of(asked, limit=2, rank=rank)


def drain(queue: FcfsQueue | PriorityQueue) -> str:
    return "".join(queue.pop().request_id for _ in range(len(queue)))


def test_fcfs_serves_in_order_and_the_preempted_first():
    queue = FcfsQueue()
    for name in "abc":
        queue.push(request(name))
    queue.push_front(request("z"))
    assert queue.peek().request_id == "z"
    assert drain(queue) == "zabc"


def test_priority_serves_by_rank():
    queue = PriorityQueue()
    for name, rank in (("late", (1, 5.0, 1)), ("low", (2, 0.0, 2)), ("early", (1, 1.0, 3)), ("first", (0, 9.0, 4))):
        queue.push(request(name, *rank))
    queue.push_front(request("back", 1, 2.0, 5))
    assert [queue.pop().request_id for _ in range(5)] == ["first", "early", "back", "late", "low"]


@pytest.mark.parametrize("queue", [FcfsQueue(), PriorityQueue()], ids=["fcfs", "priority"])
def test_anyone_can_leave_and_an_empty_line_says_so(queue):
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
