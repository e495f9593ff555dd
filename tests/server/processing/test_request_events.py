"""What the output processor reports of requests to the metrics, with a fake clock."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from support.checkpoints.byte_text import byte_tokenizer

from pagoda.common.engine.messages import (
    EngineOutput,
    EngineRequest,
    FinishedRequest,
    FirstToken,
    RequestEvents,
    pooling_request,
)
from pagoda.common.engine.pooling.values import Pooled, PoolingRules
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest, Prompt
from pagoda.server.processing.output_processor import OutputProcessor


class EventBench:
    """A processor with one request of two sequences, "a" and "b"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **params: Any) -> None:
        self.now = 1.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.events = RequestEvents()
        self.processor = OutputProcessor(byte_tokenizer(), events=self.events)
        given = SamplingParams(n=2, **({"output_kind": RequestOutputKind.DELTA} | params))
        children = [
            EngineRequest(request_id=name, prompt_token_ids=[1] * 5, rules=SamplingRules(), max_tokens=9)
            for name in "ab"
        ]
        self.now = 1.5
        self.processor.add(PreparedRequest("r", Prompt("p", [1] * 5), given, children, 0.0, 1.25))

    def step(self, now: float, *outputs: EngineOutput) -> list[RequestOutput | RawPoolingOutput]:
        self.now = now
        return self.processor.process(outputs)[0]


def says(name: str, text: str, **more: Any) -> EngineOutput:
    return EngineOutput(request_id=name, new_token_ids=byte_tokenizer().encode(text), **more)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_sequences_are_reported_when_they_start_and_end(
    monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind
) -> None:
    bench = EventBench(monkeypatch, output_kind=kind)
    bench.step(3.0, says("a", "x", scheduled=2.0))
    assert bench.events.first_tokens == [FirstToken(replica=0, latency=1.75, prompt_tokens=5, cached_tokens=0)]
    bench.step(4.0, says("a", "y"), says("b", "z", scheduled=3.5, num_cached_tokens=4, replica=1))
    assert bench.events.first_tokens[1:] == [FirstToken(replica=1, latency=2.75, prompt_tokens=5, cached_tokens=4)]
    bench.step(5.0, says("a", "z", finish_reason="length"))
    bench.step(7.0, says("b", "z", num_preemptions=1))
    assert bench.events.requests == [], "one of its sequences runs"
    bench.step(8.0, says("b", "z", finish_reason="stop", num_preemptions=1))
    common = {"arrival": 1.25, "queued": 1.5, "prompt_tokens": 5, "generation_tokens": 3, "max_tokens": 9}
    common["adapter"] = None
    first = {"replica": 0, "finish_reason": "length", "scheduled": 2.0, "first_token": 3.0, "last_token": 5.0}
    second = {"replica": 1, "finish_reason": "stop", "scheduled": 3.5, "first_token": 4.0, "last_token": 8.0}
    assert [asdict(each) for each in bench.events.sequences] == [
        common | first | {"cached_tokens": 0, "preemptions": 0},
        common | second | {"cached_tokens": 4, "preemptions": 1},
    ]
    assert bench.events.requests == [FinishedRequest(replica=0, n=2, longest=3)]


def test_tokens_are_counted_by_replica_with_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch)
    bench.step(3.0, says("a", "x", scheduled=2.0), says("b", "xyz", scheduled=2.0, replica=1))
    bench.step(4.0, says("a", "xy"), says("b", "x"), says("unknown", "x"))
    bench.step(5.0, says("a", "x"), says("b", "x"))
    tokens = {replica: (each.count, each.waits) for replica, each in bench.events.tokens.items()}
    assert tokens == {0: (4, {0.5: 2, 1.0: 1}), 1: (5, {0.0: 2, 1.0: 2})}


def test_tokens_after_a_stop_string_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch, stop=["z"])
    bench.step(3.0, says("a", "z", scheduled=2.0), says("b", "x", scheduled=2.0, num_preemptions=2))
    bench.step(4.0, says("a", "z"), says("b", "z"))
    assert bench.events.tokens[0].count == 3
    assert [each.finish_reason for each in bench.events.sequences] == ["stop"] * 2
    assert [each.preemptions for each in bench.events.sequences] == [0, 2], "the engine had no last word on either"


def test_an_aborted_request_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch)
    bench.step(3.0, says("a", "x", finish_reason="length", scheduled=2.0), says("b", "y", scheduled=2.0))
    bench.processor.abort(["r"])
    assert [each.finish_reason for each in bench.events.sequences] == ["length", "abort"]
    assert not bench.events.requests


def test_a_refused_request_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch)
    assert bench.processor.drop("r") == ["a", "b"]
    assert bench.processor.drop("r") == []
    assert not bench.events.sequences


def test_requests_of_a_dead_engine_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch)
    pool = pooling_request("p", [1, 2], PoolingRules(task="embed", use_activation=True))
    bench.processor.add(PreparedRequest("p", Prompt("p", [1, 2]), PoolingParams(), [pool], 0.0, 1.25))
    bench.processor.fail(bench.processor.request_ids)
    assert [each.finish_reason for each in bench.events.sequences] == ["error"] * 3
    assert bench.processor.request_ids == []


def test_pooling_requests_have_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EventBench(monkeypatch)
    for name in "pq":
        pool = pooling_request(name, [1, 2], PoolingRules(task="embed", use_activation=True))
        bench.processor.add(PreparedRequest(name, Prompt("p", [1, 2]), PoolingParams(), [pool], 0.0, 1.25))
    bench.step(
        3.0,
        EngineOutput(
            request_id="p",
            new_token_ids=[],
            finish_reason="stop",
            scheduled=2.0,
            pooled=Pooled.of(np.ones(1, np.float32)),
        ),
    )
    bench.processor.abort(["q"])
    assert bench.events.first_tokens == [FirstToken(replica=0, latency=None, prompt_tokens=2, cached_tokens=0)]
    pooled, aborted = bench.events.sequences
    assert (pooled.finish_reason, pooled.scheduled, pooled.last_token, pooled.generation_tokens) == (
        *("stop", 2.0, 3.0),
        None,
    )
    assert aborted.finish_reason == "abort"
    assert not bench.events.tokens
