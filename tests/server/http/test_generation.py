"""Metrics of a request, from engine outputs to histograms, with a fake clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.byte_text import byte_tokenizer

from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.observe.metrics import FinishedRequest, FinishedSequence
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.http.generation import _GenerationMeter
from pagoda.server.outputs import RequestOutput
from pagoda.server.processing.inputs import PreparedRequest, Prompt
from pagoda.server.processing.output_processor import OutputProcessor


class RecordedMetrics:
    """Metrics that record what is reported."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []

    def on_first_token(self, **_: Any) -> None:
        pass

    def on_finish(self, request: FinishedRequest) -> None:
        self.finished.append(request)


class Bench:
    """One request of two sequences, "a" and "b", and its meter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **params: Any) -> None:
        self.now = 1.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.recorder = RecordedMetrics()
        params_of_request = SamplingParams(n=2, max_tokens=9, **({"output_kind": RequestOutputKind.DELTA} | params))
        self.meter = _GenerationMeter(cast(Any, SimpleNamespace(metrics=self.recorder)), "r", params_of_request)
        self.processor = OutputProcessor(byte_tokenizer())
        children = [
            EngineRequest(request_id=name, prompt_token_ids=[1] * 5, rules=SamplingRules(), max_tokens=9)
            for name in "ab"
        ]
        self.now = 1.5
        self.processor.add(PreparedRequest("r", Prompt("p", [1] * 5), params_of_request, children, 0.0, 1.25))

    def step(self, now: float, *outputs: EngineOutput) -> list[RequestOutput]:
        self.now = now
        ready, _ = self.processor.process(outputs)
        for output in ready:
            self.meter.take(output)
        return ready


def says(name: str, text: str, **more: Any) -> EngineOutput:
    return EngineOutput(request_id=name, new_token_ids=byte_tokenizer().encode(text), **more)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_metrics_of_each_sequence(monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind) -> None:
    bench = Bench(monkeypatch, output_kind=kind)
    bench.step(3.0, says("a", "x", scheduled=2.0))
    bench.step(4.0, says("a", "y"), says("b", "z", scheduled=3.5, num_cached_tokens=4))
    bench.step(5.0, says("a", "z", finish_reason="length"))
    bench.step(7.0, says("b", "z", num_preemptions=1))
    (output,) = bench.step(8.0, says("b", "z", finish_reason="length", num_preemptions=1))
    assert output.metrics is not None
    assert (output.metrics.arrival_ts, output.metrics.queued_ts, output.metrics.scheduled_ts) == (1.25, 1.5, 2.0)
    assert (output.metrics.first_token_ts, output.metrics.last_token_ts) == (3.0, 8.0)
    first = FinishedSequence(
        is_complete=True,
        scheduled=2.0,
        first_token=3.0,
        last_token=5.0,
        cached_tokens=0,
        generation_tokens=3,
        preemptions=0,
    )
    second = FinishedSequence(
        is_complete=True,
        scheduled=3.5,
        first_token=4.0,
        last_token=8.0,
        cached_tokens=4,
        generation_tokens=3,
        preemptions=1,
    )
    assert bench.recorder.finished == [
        FinishedRequest(
            finish_reason="length",
            arrival=1.0,
            queued=1.5,
            prompt_tokens=5,
            n=2,
            max_tokens=9,
            sequences=(first, second),
        )
    ]


def test_a_stop_string_completes_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stop=["z"])
    bench.step(3.0, says("a", "z", scheduled=2.0), says("b", "x", scheduled=2.0, num_preemptions=2))
    bench.step(4.0, says("b", "z"))
    (request,) = bench.recorder.finished
    assert [each.is_complete for each in request.sequences] == [True, True]
    assert [each.preemptions for each in request.sequences] == [0, 2], "the engine had no last word on either"


def test_an_aborted_request_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.step(3.0, says("a", "x", finish_reason="length", scheduled=2.0), says("b", "y", scheduled=2.0))
    bench.processor.abort(["r"])
    bench.meter.finish("abort")
    (request,) = bench.recorder.finished
    assert [each.is_complete for each in request.sequences] == [True, False]
