"""Responses under construction: the order of events by a grammar of the protocol, over scripted answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from support.byte_text import byte_tokenizer
from support.response_grammar import check_grammar, plain
from support.scripted import outputs, pieces, script, scripts

from pagoda.common.errors import EngineDeadError, QueueFullError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.http.body import parse
from pagoda.server.http.fields.logprobs import TokenNames
from pagoda.server.openai.responses.output import ResponseAnswer, ResponseView
from pagoda.server.openai.responses.request import ResponsesRequest
from pagoda.server.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall
from pagoda.server.parsers.reader import AnswerReader, AnswerText

TEXT = byte_tokenizer()
LONG = [Reasoning("so "), Content("\n"), Content("hi"), ToolCall(0, "f", "c0"), Arguments(0, "{"), Arguments(0, "}")]


def answer_of(events: Sequence[Event], keep: int = 0, body: Any = None, **view: Any) -> ResponseAnswer:
    request = parse(ResponsesRequest, json.dumps({"input": "a"} | (body or {})).encode())
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "store": True}
    shown = ResponseView(names=TokenNames(TEXT, as_ids=False), **view)
    return ResponseAnswer(head | request.shown(SamplingParams()), script(events, keep), shown)


def streamed(answer: ResponseAnswer, made: list[RequestOutput]) -> list[Any]:
    return [event for output in made for event in answer.chunks(0, output)]


@given(scripts(), st.integers(0, 4), st.lists(st.integers(0, 99), max_size=5), st.sampled_from(["stop", "length"]))
def test_the_stream_follows_the_grammar_and_ends_with_the_whole(
    events: list[Event], keep: int, cuts: list[int], finish_reason: str
) -> None:
    sizes = pieces(len(events), cuts)
    response = check_grammar(streamed(answer_of(events, keep), outputs(sizes, finish_reason)))
    Response.model_validate(response)
    assert response["status"] == {"stop": "completed", "length": "incomplete"}[finish_reason]
    whole = answer_of(events, keep)
    for output in outputs([len(events)], finish_reason):
        whole.add(0, output)
    assert plain(whole.whole()) == plain(response)


@given(scripts(), st.integers(0, 3))
def test_an_error_closes_what_is_open(events: list[Event], keep: int) -> None:
    answer = answer_of(events, keep)
    half = streamed(answer, outputs([len(events), 0])[:-1])
    response = check_grammar([*half, *answer.fail(EngineDeadError("why"))])
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine is dead: why"}
    assert answer.ended
    assert list(answer.fail(EngineDeadError("again"))) == []


def test_an_error_before_everything() -> None:
    response = check_grammar(list(answer_of([]).fail(QueueFullError("full"))))
    assert response["error"]["code"] == "rate_limit_exceeded"


def test_a_background_response_is_queued_first() -> None:
    answer = answer_of(LONG, body={"background": True})
    events = [*answer.queued(), *streamed(answer, outputs([6]))]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    check_grammar(events)


def test_items() -> None:
    response = check_grammar(streamed(answer_of(LONG), outputs([1, 2, 3])))
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


def test_what_is_cut_is_incomplete() -> None:
    response = check_grammar(streamed(answer_of(LONG), outputs([6], "length")))
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


def test_what_the_server_ends_has_failed() -> None:
    response = check_grammar(streamed(answer_of(LONG), outputs([6], "abort")))
    assert response["error"]["code"] == "server_error"


def test_cancelled() -> None:
    answer = answer_of(LONG, body={"background": True})
    ends = []
    answer.on_end = lambda: ends.append(answer.status)
    list(answer.queued())
    streamed(answer, outputs([2, 0])[:-1])
    answer.cancel()
    answer.cancel()
    assert ends == ["cancelled"]
    assert answer.response["status"] == "cancelled"
    assert [item["status"] for item in answer.response["output"]] == ["incomplete"]


@pytest.mark.field("ResponsesRequest.include_reasoning")
def test_reasoning_can_be_left_out() -> None:
    response = check_grammar(streamed(answer_of(LONG, reasoning=False), outputs([6])))
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 7


@pytest.mark.field("ResponsesRequest.include")
def test_reasoning_can_be_sealed_and_sent_back() -> None:
    response = check_grammar(streamed(answer_of(LONG, sealed=True), outputs([6])))
    item = response["output"][0]
    del item["content"]
    body = {"input": [item, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "b"}]}
    request = parse(ResponsesRequest, json.dumps(body).encode())
    assert isinstance(request.input, list)
    assert request.conversation_of(request.input, 0).messages[0]["reasoning_content"] == "so "
    assert check_grammar(streamed(answer_of(LONG), outputs([6])))["output"][0]["encrypted_content"] is None


def test_logprobs_stand_with_their_text() -> None:
    answer = answer_of([], logprobs=1)
    answer._text = AnswerText(AnswerReader(), TEXT, skip_special_tokens=True)
    made = []
    for number, letter in enumerate("é "):
        ids = list(letter.encode())
        positions = [{token: Logprob(-1.0), token + 1: Logprob(-2.0)} for token in ids]
        end = "stop" if number else None
        made.append(RequestOutput("r", "p", [1], outputs=[CompletionOutput(0, letter, ids, None, positions, end)]))
    events = streamed(answer, made)
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
