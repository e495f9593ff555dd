"""Limits of the queue: sequences, prompt tokens, each key's share and new grammars are 429s, counted; time is a 504."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.clock import Clock
from support.suite.watching import eventually

from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.structured_output.grammar import ResolvedGrammar
from pagoda.common.errors import RequestError
from pagoda.server.core_client.client import (
    Admission,
    Load,
    OverLimitError,
    Overload,
    QueueLimits,
    QueueUse,
    last_of_most,
)
from pagoda.server.core_client.ipc_messages import OtherUse
from pagoda.server.http import state
from pagoda.server.http.state import queue_limits
from pagoda.server.processing.workers.grammar_check import GrammarCheck
from pagoda.server.processing.workers.grammar_worker import GrammarJob, GrammarReply

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
ENDLESS = {"prompt": "abc", "max_tokens": 60_000, "temperature": 0, "stream": True}
SHORT = {"prompt": "abc", "max_tokens": 1}


def rejections(server: LiveServer, reason: str) -> float:
    labels = {"model_name": "fake", "reason": reason}
    value = server.state.metrics.registry.get_sample_value("vllm:admission_rejections_total", labels)
    assert value is not None
    return value


def started(server: LiveServer, body: dict[str, Any], headers: dict[str, str], count: int = 1) -> list[Any]:
    """Connections with running requests."""
    before = server.llm.num_unfinished
    connections = [server.sent("/v1/completions", body, headers) for _ in range(count)]
    eventually(lambda: server.llm.num_unfinished == before + count)
    return connections


@pytest.mark.setting("--max-num-queued-tokens")
def test_queued_prompt_tokens_are_bounded() -> None:
    with live_server("fake:endless", engine={"max_num_queued_tokens": 20}) as server:
        (connection,) = started(server, ENDLESS | {"prompt": "a" * 15}, {})
        refused = server.response("POST", "/v1/completions", SHORT | {"prompt": "a" * 6})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        error = json.loads(refused.body)["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert rejections(server, "max_num_queued_tokens") == 1
        assert server.post("/v1/completions", SHORT | {"prompt": "a" * 5})[0] == 200
        connection.close()
        eventually(lambda: not server.llm.num_unfinished)
        assert server.post("/v1/completions", SHORT | {"prompt": "a" * 20})[0] == 200
        status, answer = server.post("/v1/completions", SHORT | {"prompt": "a" * 11, "n": 2, "temperature": 1})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "22 prompt tokens are above the limit of 20 (--max-num-queued-tokens)" in answer["error"]["message"]


@pytest.mark.setting("--max-key-share")
def test_a_key_cannot_fill_the_queue_of_others() -> None:
    engine = {"max_num_queued_reqs": 8, "max_key_share": 0.5}
    with live_server("fake:endless", engine=engine, api_key=("alice", "bob")) as server:
        connections = started(server, ENDLESS, ALICE, 4)
        refused = server.response("POST", "/v1/completions", SHORT, ALICE)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert b"this API key has 4 of its 4 sequences in progress (--max-key-share)" in refused.body
        assert rejections(server, "max_key_share") == 1
        assert server.post("/v1/completions", SHORT, **BOB)[0] == 200
        connections += started(server, ENDLESS, BOB, 4)
        assert server.post("/v1/completions", SHORT, **BOB)[0] == 429
        assert rejections(server, "max_num_queued_reqs") == 1
        for connection in connections:
            connection.close()
        eventually(lambda: not server.llm.num_unfinished)
        assert server.post("/v1/completions", SHORT, **ALICE)[0] == 200


def test_one_key_may_use_the_whole_queue() -> None:
    with live_server("fake:endless", engine={"max_num_queued_reqs": 2}, api_key=("alice",)) as server:
        connections = started(server, ENDLESS, ALICE, 2)
        assert server.post("/v1/completions", SHORT, **ALICE)[0] == 429
        for connection in connections:
            connection.close()


def test_a_request_of_many_prompts_is_refused_before_any_of_them_runs() -> None:
    with live_server("fake:endless", engine={"max_num_queued_reqs": 4}) as server:
        (connection,) = started(server, ENDLESS, {})
        assert server.post("/v1/completions", SHORT | {"prompt": ["a"] * 4})[0] == 429
        assert server.llm.num_unfinished == 1
        connection.close()


def test_a_request_of_many_prompts_that_never_fits_is_not_told_to_come_again() -> None:
    with live_server("fake:endless", engine={"max_num_queued_tokens": 20}) as server:
        status, answer = server.post("/v1/completions", SHORT | {"prompt": ["a" * 8] * 3})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "24 prompt tokens are above the limit of 20 (--max-num-queued-tokens)" in answer["error"]["message"]
        eventually(lambda: not server.llm.num_unfinished)
        assert server.post("/v1/completions", SHORT | {"prompt": ["a" * 8] * 2})[0] == 200
        assert server.llm._ready().requests.use.total == Load()


def test_default_limits_follow_what_the_engine_runs() -> None:
    with live_server(engine={"max_num_seqs": 300}) as server:
        limits = queue_limits(server.llm.config, server.llm.info, 2)
        assert (limits.sequences, limits.tokens, limits.key_share) == (2400, 1 << 22, 0.5)
        assert server.llm._admission.limits == queue_limits(server.llm.config, server.llm.info, 0)
    with live_server(engine={"max_num_seqs": 2}) as server:
        assert queue_limits(server.llm.config, server.llm.info, 1) == QueueLimits(
            sequences=2048, tokens=1 << 22, waiting=64, overload_seconds=2.0, key_share=1.0
        )
    with live_server(engine={"max_num_seqs": 300, "max_num_queued_reqs": 600}) as server:
        limits = queue_limits(server.llm.config, server.llm.info, 1)
        assert (limits.waiting, limits.overload_seconds) == (150, None)


def test_a_burst_is_taken_and_a_standing_queue_is_not() -> None:
    now = 10.0
    overload = Overload(lambda: now)
    limits = QueueLimits(waiting=4, overload_seconds=2.0)
    overload.observe(2, 5, limits)
    now = 11.9
    overload.check(limits, 100)
    overload.observe(2, 98, limits)
    now = 12.0
    overload.check(limits, 6)  # others were aborted
    with pytest.raises(OverLimitError, match=r"98 requests wait, more than 4 for over 2 s \(--max-overload-seconds\)"):
        overload.check(limits, 100)
    overload.check(QueueLimits(waiting=4), 100)
    overload.observe(2, 4, limits)
    overload.check(limits, 6)
    now = 21.9
    with pytest.raises(OverLimitError):
        overload.check(limits, 7)  # no burst so soon after a refusal
    now = 31.9
    overload.check(limits, 7)


@pytest.mark.setting("--max-overload-seconds")
def test_an_overloaded_server_refuses_further_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MIN_WAITING", 3)
    clock, engine = Clock(), {"max_num_seqs": 2, "max_overload_seconds": 20}
    with live_server("fake:endless", engine=engine, clock=clock) as server:
        connections = started(server, ENDLESS, {}, 5)
        eventually(lambda: server.llm.stats.waiting == 3)
        clock.advance(20)
        server.llm.check_load(Load(1), "")  # as many wait as may
        connections += started(server, ENDLESS, {})
        eventually(lambda: server.llm.stats.waiting == 4)
        clock.advance(19.9)
        server.llm.check_load(Load(1), "")
        clock.advance(0.1)
        assert server.post("/v1/completions", SHORT)[0] == 429
        eventually(lambda: server.llm.stats.waiting == 3)  # as many were refused as waited above the limit
        assert rejections(server, "max_overload_seconds") == 2
        connections += started(server, ENDLESS, {})  # the three that wait may
        status, answer = server.post("/v1/messages", b"no JSON")  # refused before it is read
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert rejections(server, "max_overload_seconds") == 3
        assert server.post("/tokenize", {"prompt": "a"})[0] == server.get("/v1/models")[0] == 200
        for connection in connections:
            connection.close()
        eventually(lambda: not server.llm.num_unfinished)
        assert server.post("/v1/completions", SHORT)[0] == 200


def test_waiting_requests_are_surplus_once_as_many_were_refused() -> None:
    now = 10.0
    overload = Overload(lambda: now)
    limits = QueueLimits(waiting=4, overload_seconds=2.0)

    def refuse(times: int) -> None:
        for _ in range(times):
            with pytest.raises(OverLimitError):
                overload.check(limits, 16)

    overload.observe(2, 14, limits)
    now = 12.0
    refuse(9)
    assert overload.surplus(limits, 16, 16) == 0
    refuse(1)
    assert overload.surplus(limits, 16, 16) == 10
    assert overload.surplus(limits, 16, 8) == 5  # the other half is another process's
    assert overload.surplus(limits, 17, 17) == 0
    assert overload.surplus(limits, 6, 6) == 0
    overload.observe(2, 4, limits)
    overload.observe(2, 14, limits)
    assert overload.surplus(limits, 16, 16) == 0  # refusals of an overload that is over


def test_while_many_are_refused_fewer_may_wait() -> None:
    now = 10.0
    overload = Overload(lambda: now)
    limits = QueueLimits(waiting=8, overload_seconds=2.0)

    def refused(in_progress: int) -> bool:
        try:
            overload.check(limits, in_progress)
        except OverLimitError:
            return True
        return False

    overload.observe(2, 9, limits)
    now = 12.0
    assert [refused(11) for _ in range(7)] == [True] * 7
    assert not refused(10)
    assert refused(11)  # the eighth within CALM_SECONDS
    overload.observe(2, 8, limits)
    assert [refused(10), refused(5), refused(4)] == [True, True, False]
    now = 21.9
    assert refused(5)
    now = 22.0
    assert not refused(10)  # since the eighth, few were refused
    assert refused(11)
    overload.observe(2, 9, limits)
    for second in range(33, 49, 2):  # eight, but not within CALM_SECONDS
        now = second
        assert refused(11)
    assert not refused(10)


def test_the_last_requests_of_who_has_most_are_chosen() -> None:
    waiting = {"a": [1, 2, 3, 4, 5], "b": [6, 7], "c": [8], "d": []}
    assert last_of_most(waiting, 3) == [5, 4, 3]
    assert sorted(last_of_most(waiting, 5)) == [2, 3, 4, 5, 7]
    assert sorted(last_of_most(waiting, 99)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_waiting_requests_of_a_standing_overload_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MIN_WAITING", 3)
    clock, engine = Clock(), {"max_num_seqs": 2, "max_overload_seconds": 20}
    with live_server("fake:endless", engine=engine, clock=clock) as server:
        connections = started(server, ENDLESS, {}, 2)
        eventually(lambda: server.llm.stats.running == 2)
        connections.append(server.sent("/v1/completions", ENDLESS | {"prompt": ["a", "b"]}, {}))
        eventually(lambda: server.llm.num_unfinished == 4)
        connections += started(server, ENDLESS, {}, 6)
        eventually(lambda: server.llm.stats.waiting == 8)
        clock.advance(20)
        for _ in range(3):
            assert server.post("/v1/completions", SHORT)[0] == 429
        assert server.llm.num_unfinished == 10
        assert server.post("/v1/completions", SHORT)[0] == 429
        eventually(lambda: server.llm.num_unfinished == 6)
        eventually(lambda: rejections(server, "max_overload_seconds") == 8)  # counted after they are forgotten
        for connection in connections[-4:]:
            response = HTTPResponse(connection)
            response.begin()
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert b"among the last of those that wait" in response.read()
        assert [server.llm.stats.running, len(server.llm._ready().requests.use.owners)] == [2, 1]
        for connection in connections:
            connection.close()
        eventually(lambda: not server.llm.num_unfinished)
        assert server.llm._ready().requests.use.total == Load()
        assert server.post("/v1/completions", SHORT)[0] == 200


def test_one_request_of_many_sequences_is_no_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MIN_WAITING", 3)
    with live_server("fake:endless", engine={"max_num_seqs": 2, "max_overload_seconds": 0}) as server:
        body = ENDLESS | {"prompt": ["abc"] * 8, "n": 2, "temperature": 1}
        connection = server.sent("/v1/completions", body, {})
        eventually(lambda: server.llm.stats.waiting > 3)
        server.llm.check_load(Load(1), "")
        assert server.post("/v1/completions", SHORT)[0] == 200
        connection.close()


def test_callers_are_counted_once() -> None:
    use = QueueUse()
    for request_id, group in (("a-0", "a"), ("a-1", "a"), ("b", ""), ("c", "")):
        use.add(request_id, Load(3), group=group)
    assert use.callers == 3
    use.remove(["a-0", "b"])
    assert (use.callers, use.of_group("a"), use.of_group("")) == (2, Load(3), Load())


def test_what_ended_does_not_count() -> None:
    use = QueueUse()
    limits = QueueLimits(sequences=4, tokens=100, key_share=0.5)
    use.add("a", Load(2, 40), "x")
    use.add("b", Load(1, 10), "y")
    with pytest.raises(RequestError, match="request_id 'b' is in use"):
        use.add("b", Load(1), "x")
    with pytest.raises(OverLimitError) as error:
        limits.check(use, Load(1), "x")
    assert error.value.reason == "max_key_share"
    limits.check(use, Load(1, 40), "y")
    with pytest.raises(RequestError, match=r"51 prompt tokens are above the limit of 50 \(--max-num-queued-tokens x"):
        limits.check(use, Load(1, 51), "y")
    use.remove(["a", "unknown", "a"])
    assert (use.total, use.of("x"), use.of("y")) == (Load(1, 10), Load(), Load(1, 10))
    limits.check(use, Load(2, 50), "x")


def test_every_end_of_a_request_frees_its_part_of_the_queue() -> None:
    with live_server("fake:endless") as server:
        requests = server.llm._ready().requests
        for close in (True, False):
            (connection,) = started(server, ENDLESS, {})
            assert requests.use.total == Load(1, 3)
            if close:
                connection.close()
            else:
                server.call(server.llm.abort(server.llm.request_ids))
            eventually(lambda: requests.use.total == Load())
            connection.close()
        assert server.post("/v1/completions", SHORT)[0] == 200
        assert requests.use.total == Load()


# New grammars.


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammar checks wait for this event."""
    event = threading.Event()

    def wait(self: GrammarCheck, worker: object, job: GrammarJob) -> GrammarReply:
        assert job.grammar is not None
        return GrammarReply(resolved=ResolvedGrammar(job.grammar.text)) if event.wait(60) else GrammarReply("late")

    monkeypatch.setattr(GrammarCheck, "_try", wait)
    yield event
    event.set()


def test_new_grammars_beyond_a_keys_share_are_429(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.async_llm.MAX_WAITING", 2)

    def asked(word: str) -> dict[str, Any]:
        return SHORT | {"structured_outputs": {"choice": [word]}}

    with live_server(api_key=("alice", "bob")) as server:
        first = [server.sent("/v1/completions", asked("b"), ALICE)]
        line = server.llm._ready().inputs._grammars._line
        eventually(lambda: len(line) == 1)
        refused = server.response("POST", "/v1/completions", asked("c"), ALICE)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert rejections(server, "max_key_share") == 1
        first.append(server.sent("/v1/completions", asked("d"), BOB))
        eventually(lambda: len(line) == 2)
        stuck.set()
        for connection in first:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()


def test_requests_that_wait_for_a_grammar_are_in_the_queue(stuck: threading.Event) -> None:
    with live_server(engine={"max_num_queued_reqs": 2}) as server:
        use = server.llm._ready().requests.use
        asked = SHORT | {"structured_outputs": {"choice": ["b"]}}
        waiting = [server.sent("/v1/completions", asked, {}) for _ in range(2)]
        eventually(lambda: use.total.sequences == 2)
        assert server.post("/v1/completions", SHORT)[0] == 429
        waiting.pop().close()
        eventually(lambda: use.total.sequences == 1)
        assert server.post("/v1/completions", SHORT)[0] == 200
        stuck.set()
        assert waiting[0].recv(12) == b"HTTP/1.1 200"
        waiting[0].close()
        eventually(lambda: use.total == Load())


# Time.


def late(server: LiveServer, path: str, body: dict[str, Any], begun: Callable[[], object]) -> HTTPResponse:
    """The response to a request in whose midst the time allowed for it passes."""
    connection = server.sent(path, body, {})
    eventually(begun)
    server.advance(LIMIT)
    response = HTTPResponse(connection)
    response.begin()
    return response


LIMIT = 600.0


@pytest.mark.setting("--request-timeout")
def test_a_request_that_takes_too_long_is_aborted() -> None:
    with live_server("fake:endless", request_timeout=LIMIT) as server:
        body = {"prompt": "a", "max_tokens": 60_000}
        for extra in ({}, {"n": 2, "temperature": 1}, {"use_beam_search": True, "n": 2}):
            response = late(server, "/v1/completions", body | extra, lambda: server.state.running)
            error = json.loads(response.read())["error"]
            assert (response.status, error["type"]) == (504, "server_error"), extra
            assert "longer than 600 s (--request-timeout)" in error["message"]
            eventually(lambda: not server.llm.num_unfinished and not server.llm.stats.running)
        connection = server.sent("/v1/completions", body | {"stream": True}, {})
        response = HTTPResponse(connection)
        response.begin()
        streamed = response.readline() + response.readline() + response.readline()
        server.advance(LIMIT)
        *events, last, done = [each for each in (streamed + response.read()).decode().split("\n\n") if each]
        assert len(events) > 1
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
        eventually(lambda: not server.llm.num_unfinished)
        assert not server.state.running
        assert server.post("/v1/completions", SHORT)[0] == 200


def test_time_in_line_for_a_grammar_counts(stuck: threading.Event) -> None:
    with live_server(request_timeout=LIMIT) as server:
        body = SHORT | {"structured_outputs": {"choice": ["b"]}}
        in_line = server.llm._ready().inputs._grammars._line
        assert late(server, "/v1/completions", body, lambda: in_line).status == 504
        assert not server.llm.num_unfinished
        stuck.set()
        assert server.post("/v1/completions", SHORT)[0] == 200


def test_pooling_requests_have_the_same_time() -> None:
    with live_server("fake:pool-slow", request_timeout=LIMIT) as server:
        response = late(server, "/v1/embeddings", {"input": ["abc"] * 1000}, lambda: server.llm.num_unfinished)
        assert response.status == 504
        assert json.loads(response.read())["error"]["type"] == "server_error"
        eventually(lambda: not server.llm.num_unfinished)


def test_what_other_api_server_processes_use_counts() -> None:
    limits = QueueLimits(sequences=8, tokens=20, key_share=0.5)
    use = QueueUse()
    limits.check(use, Load(1, 6), "x", others=Load(7, 14), others_of_owner=Load(3, 4))
    for load, others, own in (
        (Load(1, 1), Load(8, 0), Load()),
        (Load(1, 7), Load(1, 14), Load()),
        (Load(1, 1), Load(4, 4), Load(4, 4)),
        (Load(1, 6), Load(1, 5), Load(1, 5)),
    ):
        with pytest.raises(OverLimitError):
            limits.check(use, load, "x", others=others, others_of_owner=own)


def test_requests_are_admitted_against_what_other_processes_use() -> None:
    use, rejected = QueueUse(), list[str]()
    engine = SimpleNamespace(others=OtherUse(3, 12, 2, {"x": (3, 12)}), raise_if_unavailable=lambda: None)
    sleep = SimpleNamespace(raise_if_asleep=lambda: None)
    admission = Admission(SchedulerConfig(), cast(Any, engine), cast(Any, sleep), lambda: use, rejected.append)
    admission.limits = QueueLimits(sequences=8, tokens=20, key_share=0.75)
    admission.check(Load(3, 3), "x")
    for load, owner in ((Load(6, 1), "y"), (Load(1, 9), "y"), (Load(4, 1), "x")):
        with pytest.raises(OverLimitError):
            admission.check(load, owner)
    assert rejected == ["max_num_queued_reqs", "max_num_queued_tokens", "max_key_share"]
