"""An engine's messages are divided among its clients."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.server.core_client import shared
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Abort,
    AddRequest,
    Command,
    Failed,
    FromEngine,
    Heartbeat,
    OtherUse,
    Refused,
    Reply,
    Shutdown,
    StepReply,
)
from pagoda.server.core_client.shared import ClientRouter


@pytest.fixture(autouse=True)
def always_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The use of other clients is sent at every step, except where the interval is tested."""
    if request.function is not test_what_others_use_is_told_now_and_then:
        monkeypatch.setattr(shared, "OTHERS_SECONDS", 0.0)


class Clients:
    def __init__(self, count: int = 2) -> None:
        self.sent: list[tuple[int | None, FromEngine]] = []  # None: all clients
        self.router = ClientRouter(
            count, lambda client, message: self.sent.append((client, message)), lambda m: self.sent.append((None, m))
        )

    def add_together(self, client: int, first: str, *others: str) -> None:
        request = EngineRequest(request_id=first, prompt_token_ids=[1], rules=SamplingRules(), max_tokens=1)
        self.router.note(client, AddRequest(request, tuple((each, 7) for each in others)))

    def add(self, client: int, *request_ids: str, prompt: int = 1, owner: str = "", group: str = "") -> None:
        for each in request_ids:
            request = EngineRequest(
                request_id=each,
                prompt_token_ids=[1] * prompt,
                rules=SamplingRules(),
                max_tokens=1,
                owner=owner,
                group=group,
            )
            assert self.router.note(client, AddRequest(request)) == AddRequest(request)

    def step(self, *outputs: EngineOutput) -> dict[int | None, StepReply]:
        """Send a step and return what each client gets."""
        self.sent.clear()
        self.router.send(StepReply(StepOutputs(outputs=list(outputs), stats=EngineStats(running=1))))
        return {client: message for client, message in self.sent if isinstance(message, StepReply)}


def token(request_id: str, *, last: bool = False) -> EngineOutput:
    return EngineOutput(request_id=request_id, new_token_ids=[1], finish_reason="length" if last else None)


def sequences(reply: StepReply) -> int:
    assert reply.others is not None
    return reply.others.sequences


def ids(reply: StepReply) -> list[str]:
    return [output.request_id for output in reply.outputs.outputs]


def test_each_client_gets_its_outputs_and_the_number_of_the_others_sequences() -> None:
    clients = Clients()
    clients.add(0, "a", "b")
    clients.add(1, "c")
    replies = clients.step(token("c"), token("a"), token("b", last=True))
    assert ids(replies[0]) == ["a", "b"]
    assert ids(replies[1]) == ["c"]
    assert [sequences(replies[0]), sequences(replies[1])] == [1, 1]  # b has ended
    assert replies[1].outputs.stats.running == 1
    clients.router.note(0, Abort(["a"]))
    replies = clients.step(token("a"), token("c"))
    assert ids(replies[0]) == []  # aborted, but client 0 gets every step
    assert [sequences(replies[0]), sequences(replies[1])] == [1, 0]


def test_a_client_gets_tokens_callers_and_keys_of_the_others() -> None:
    clients = Clients(3)
    clients.add(0, "a", "b", prompt=5, owner="x", group="g")
    clients.add(1, "c", prompt=7, owner="x")
    clients.add(1, "d", prompt=2, owner="y")
    replies = clients.step(token("a"), token("c"), token("d"))
    assert replies[0].others == OtherUse(2, 9, 2, {"x": (1, 7), "y": (1, 2)})
    assert replies[1].others == OtherUse(2, 10, 1, {"x": (2, 10)})
    assert replies[2].others == OtherUse(4, 19, 3, {"x": (3, 17), "y": (1, 2)})
    replies = clients.step(token("a", last=True), token("b", last=True), token("d", last=True))
    assert replies[1].others == NO_OTHERS
    assert replies[0].others == OtherUse(1, 7, 1, {"x": (1, 7)})


def test_what_others_use_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(shared.time, "monotonic", lambda: now)
    clients = Clients()
    clients.add(0, "a", "b")
    assert clients.step(token("a"))[1].others == OtherUse(2, 2, 2, {"": (2, 2)})
    clients.add(1, "c")
    assert clients.step(token("c"), token("b", last=True))[1].others is None
    now += 1.5 * shared.OTHERS_SECONDS
    assert clients.step(token("c"))[1].others == OtherUse(1, 1, 1, {"": (1, 1)})
    assert clients.step(token("c"), token("a", last=True))[1].others == NO_OTHERS  # told at once


def test_sequences_that_came_in_one_message_are_of_one_client() -> None:
    clients = Clients()
    clients.add(0, "x")
    clients.add_together(1, "a", "b", "c")
    replies = clients.step(token("c", last=True), token("b"), token("a"), token("x"))
    assert ids(replies[1]) == ["c", "b", "a"]
    assert [sequences(replies[0]), sequences(replies[1])] == [2, 1]


def test_a_client_without_outputs_gets_statistics_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(shared.time, "monotonic", lambda: now)
    clients = Clients(3)
    clients.add(0, "a")
    assert set(clients.step(token("a"))) == {0, 1, 2}  # the first
    assert set(clients.step(token("a"))) == {0}
    now += shared.STATS_SECONDS
    assert set(clients.step(token("a"))) == {0, 1, 2}
    assert set(clients.step()) == {0, 1, 2}  # the engine is idle


def with_ticket(kind: type[Any], ticket: int) -> Any:
    """A message of a kind; its other fields do not matter to a router."""
    others = [None for each in msgspec.structs.fields(kind) if each.required and each.name != "ticket"]
    return kind(ticket, *others)


@pytest.mark.parametrize("reply", get_args(Reply))
@pytest.mark.parametrize("command", get_args(Command))
def test_replies_go_to_the_client_that_asked(command: type[Any], reply: type[Any]) -> None:
    clients = Clients(3)
    tickets = {client: clients.router.note(client, with_ticket(command, 7)).ticket for client in range(3)}
    assert len(set(tickets.values())) == 3
    for client in (2, 0, 1):
        clients.router.send(with_ticket(reply, tickets[client]))
    assert clients.sent == [(client, with_ticket(reply, 7)) for client in (2, 0, 1)]
    assert clients.router.note(1, Shutdown()) == Shutdown()


def test_a_refused_request_is_reported_to_its_client() -> None:
    clients = Clients()
    clients.add(1, "a")
    clients.router.send(Refused("a", "prompt", "too long"))
    clients.router.send(Refused("unknown", "prompt", "too long"))
    assert clients.sent == [(1, Refused("a", "prompt", "too long"))]
    assert clients.step()[0].others == NO_OTHERS


def test_what_concerns_all_is_sent_to_all() -> None:
    clients = Clients()
    for message in (Heartbeat(1, True), Failed("EngineDeadError", "x")):
        clients.router.send(message)
        assert clients.sent.pop() == (None, message)
