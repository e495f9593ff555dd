"""POST /inference/v1/generate: token ids in and out, streamed and whole, and rendered prompts as its body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

PATH = "/inference/v1/generate"
BODY: dict[str, Any] = {"token_ids": [97], "sampling_params": {"max_tokens": 3, "temperature": 0}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def generate(server: LiveServer, **more: Any) -> Any:
    status, answer = server.post(PATH, BODY | more)
    assert status == 200, answer
    return answer


def events(server: LiveServer, **more: Any) -> list[Any]:
    status, text = server.post(PATH, BODY | {"stream": True} | more)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.field("GenerateRequest.token_ids|sampling_params|output_mode|return_token_ids|request_id|model")
def test_a_whole_answer(server: LiveServer) -> None:
    answer = generate(server, request_id="r", model="fake")
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("generate-tokens-r", "fake", "tokens")
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["logprobs"]) == ([98, 99, 100], "length", None)
    assert "text" not in choice
    assert answer["prompt_token_ids"] is None
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    answer = generate(server, output_mode="text", return_token_ids=True)
    assert answer["choices"][0]["text"] == "bcd"
    assert answer["prompt_token_ids"] == [97]
    assert server.post(PATH, BODY | {"model": "other"})[0] == 404


@pytest.mark.field("GenerateRequest.stream|stream_options")
def test_a_stream(server: LiveServer) -> None:
    chunks = events(server, return_token_ids=True, output_mode="text")
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [98, 99, 100]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcd"
    assert chunks[0]["prompt_token_ids"] == [97]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    *chunks, last = events(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_several_answers_and_log_probabilities(server: LiveServer) -> None:
    params = {"max_tokens": 2, "n": 2, "logprobs": 1, "prompt_logprobs": 1}
    answer = generate(server, token_ids=[97, 98], sampling_params=params)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert entry["token_id"] == token
            assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token_id", "logprob", "rank")}
    assert answer["prompt_logprobs"][0] is None
    assert "98" in answer["prompt_logprobs"][1]
    answer = generate(server, sampling_params=params, output_mode="text")
    assert answer["choices"][0]["logprobs"]["content"][0]["bytes"]


def test_without_max_tokens_it_goes_on_to_the_context(server: LiveServer) -> None:
    assert len(generate(server, sampling_params={"ignore_eos": True})["choices"][0]["token_ids"]) == 63


def test_params_that_are_objects(server: LiveServer) -> None:
    params = {"max_tokens": 4, "structured_outputs": {"choice": ["xy"]}, "repetition_detection": {}}
    assert generate(server, sampling_params=params, output_mode="text")["choices"][0]["text"] == "xy"


@pytest.mark.field("GenerateRequest.cache_salt|priority")
def test_salt_and_priority() -> None:
    with live_server(engine={"scheduling_policy": "priority"}) as server:
        assert generate(server, priority=3, cache_salt="x")["choices"]
    with live_server() as server:
        assert server.post(PATH, BODY | {"priority": 3})[0] == 400


def test_a_rendered_prompt_is_a_body(server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    rendered = server.post("/v1/chat/completions/render", chat | {"return_token_offsets": True})[1]
    status, answer = server.post(PATH, rendered | {"output_mode": "text"})
    assert status == 200, answer
    whole = server.post("/v1/chat/completions", chat)[1]
    assert answer["choices"][0]["text"] == whole["choices"][0]["message"]["content"]


@each_row(
    ("more", "field", "message"),
    [
        ({"token_ids": []}, "token_ids", "token_ids"),
        ({"token_ids": [-1]}, "token_ids", "token_ids"),
        ({"token_ids": [10**6]}, "token_ids", "vocabulary"),
        ({"token_ids": [97] * 100}, "token_ids", "context"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "x"}}, "sampling_params.temperature", "sampling_params.temperature"),
        ({"sampling_params": {"nothing": 1}}, "sampling_params.nothing", "sampling_params.nothing"),
        (
            {"sampling_params": {"structured_outputs": {"x": 1}}},
            "sampling_params.structured_outputs.x",
            "structured_outputs.x is unknown",
        ),
        (
            {"sampling_params": {"structured_outputs": "x"}},
            "sampling_params.structured_outputs",
            "structured_outputs must be an object",
        ),
        ({"sampling_params": {"allowed_token_ids": [10**6]}}, "sampling_params.allowed_token_ids", "vocabulary"),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
            "cannot be streamed",
        ),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode", "detokenize"),
    ],
)
def test_invalid_bodies_name_the_field(server: LiveServer, more: Any, field: str, message: str) -> None:
    status, answer = server.post(PATH, BODY | more)
    assert (status, answer["error"]["param"].partition("[")[0]) == (400, field), answer
    assert message in answer["error"]["message"]


def test_without_a_tokenizer() -> None:
    with live_server(engine={"skip_tokenizer_init": True}) as server:
        assert generate(server)["choices"][0]["token_ids"] == [98, 99, 100]
        assert server.post(PATH, BODY | {"output_mode": "text"})[1]["error"]["param"] == "output_mode"


def test_stream_options_without_effect_are_a_hint(server: LiveServer) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}, "stream": True}
    answer = server.response("POST", PATH, BODY | options)
    assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, "stream_options.continuous_usage_stats")
