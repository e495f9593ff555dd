"""ResponsesBuilder: event order and content for scripted outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.scripted import outputs, pieces, script, scripts
from support.servers.response_grammar import check_grammar, plain

from pagoda.common.errors import EngineDeadError, QueueFullError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.openai.responses.output import ResponsesBuilder, ResponseView
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.http.body import parse
from pagoda.server.http.fields import TokenNames
from pagoda.server.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser, OutputParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall

TEXT = byte_tokenizer()
LONG = [Reasoning("so "), Content("\n"), Content("hi"), ToolCall(0, "f", "c0"), Arguments(0, "{"), Arguments(0, "}")]


def builder_of(events: Sequence[Event], keep: int = 0, body: Any = None, **view: Any) -> ResponsesBuilder:
    request = parse(ResponsesRequest, json.dumps({"input": "a"} | (body or {})).encode())
    fixed = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "store": True}
    response_view = ResponseView(names=TokenNames(TEXT, as_ids=False), **view)
    return ResponsesBuilder(fixed | request.shown(SamplingParams()), script(events, keep), response_view)


def streamed(builder: ResponsesBuilder, results: list[RequestOutput]) -> list[Any]:
    return [event for output in results for event in builder.chunks(0, output)]


@given(scripts(), st.integers(0, 4), st.lists(st.integers(0, 99), max_size=5), st.sampled_from(["stop", "length"]))
def test_streamed_and_whole_responses_agree(
    events: list[Event], keep: int, cuts: list[int], finish_reason: str
) -> None:
    sizes = pieces(len(events), cuts)
    response = check_grammar(streamed(builder_of(events, keep), outputs(sizes, finish_reason)))
    Response.model_validate(response)
    assert response["status"] == {"stop": "completed", "length": "incomplete"}[finish_reason]
    whole = builder_of(events, keep)
    for output in outputs([len(events)], finish_reason):
        whole.add(0, output)
    assert plain(whole.whole()) == plain(response)


@given(scripts(), st.integers(0, 3))
def test_an_error_closes_open_items(events: list[Event], keep: int) -> None:
    builder = builder_of(events, keep)
    half = streamed(builder, outputs([len(events), 0])[:-1])
    response = check_grammar([*half, *builder.fail(EngineDeadError("why"))])
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine has ended; the server's log says why"}
    assert builder.ended
    assert list(builder.fail(EngineDeadError("again"))) == []


def test_an_error_before_the_first_output() -> None:
    response = check_grammar(list(builder_of([]).fail(QueueFullError("full"))))
    assert (response["error"]["code"], response["output"]) == ("rate_limit_exceeded", [])


def test_a_background_response_is_queued_first() -> None:
    builder = builder_of(LONG, body={"background": True})
    events = [*builder.queued(), *streamed(builder, outputs([6]))]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    check_grammar(events)


def test_items() -> None:
    response = check_grammar(streamed(builder_of(LONG), outputs([1, 2, 3])))
    reasoning, message, call = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"], reasoning["summary"]) == ("reasoning", "so ", [])
    assert (message["type"], message["role"], message["content"][0]["text"]) == ("message", "assistant", "\nhi")
    assert (call["type"], call["call_id"], call["name"], call["arguments"]) == ("function_call", "c0", "f", "{}")
    assert [item["id"].partition("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
    assert response["completed_at"] >= response["created_at"]
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 11,
    }


def test_truncated_output_is_incomplete() -> None:
    response = check_grammar(streamed(builder_of(LONG), outputs([6], "length")))
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


def test_an_aborted_response_has_failed() -> None:
    response = check_grammar(streamed(builder_of(LONG), outputs([6], "abort")))
    assert response["error"]["code"] == "server_error"


def test_cancelled() -> None:
    builder = builder_of(LONG, body={"background": True})
    ends = []
    builder.on_end = lambda: ends.append(builder.status)
    list(builder.queued())
    streamed(builder, outputs([2, 0])[:-1])
    builder.cancel()
    builder.cancel()
    assert ends == ["cancelled"]
    assert builder.response["status"] == "cancelled"
    assert [item["status"] for item in builder.response["output"]] == ["incomplete"]


@pytest.mark.field("ResponsesRequest.include_reasoning")
def test_reasoning_can_be_excluded() -> None:
    response = check_grammar(streamed(builder_of(LONG, reasoning=False), outputs([6])))
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 7


@pytest.mark.field("ResponsesRequest.include")
def test_encoded_reasoning_can_be_sent_back() -> None:
    response = check_grammar(streamed(builder_of(LONG, encrypted_content=True), outputs([6])))
    item = response["output"][0]
    del item["content"]
    body = {"input": [item, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "b"}]}
    request = parse(ResponsesRequest, json.dumps(body).encode())
    assert isinstance(request.input, list)
    assert request.conversation_of(request.input, 0).messages[0]["reasoning_content"] == "so "
    assert check_grammar(streamed(builder_of(LONG), outputs([6])))["output"][0]["encrypted_content"] is None


def test_logprobs_come_with_their_text() -> None:
    builder = builder_of([], logprobs=1)
    builder._parser = DeltaParser(OutputParser(), TEXT, skip_special_tokens=True)
    results = []
    for number, letter in enumerate("é "):
        ids = list(letter.encode())
        positions = [{token: Logprob(-1.0), token + 1: Logprob(-2.0)} for token in ids]
        end = "stop" if number else None
        results.append(RequestOutput("r", "p", [1], outputs=[CompletionOutput(0, letter, ids, None, positions, end)]))
    events = streamed(builder, results)
    response = check_grammar(events)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    part = response["output"][0]["content"][0]
    assert [len(each) for each in deltas] == [2, 1]
    assert part["logprobs"] == [*deltas[0], *deltas[1]]
    assert part["logprobs"][2] == {
        "token": " ",
        "logprob": -1.0,
        "bytes": [32],
        "top_logprobs": [{"token": " ", "logprob": -1.0, "bytes": [32]}],
    }
