"""The effect of each request field on the response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.beam_search import BeamSearch, BeamSearchParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.processing.inputs import RequestOrigin, cache_key_of

TEXT: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BOTH = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_prompt_tokens_details=True, enable_request_id_headers=True) as server:
        yield server


def answer_of(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def chunks_of(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without [DONE]."""
    status, raw = server.post(path, body | {"stream": True})
    assert status == 200, raw
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def param_of(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    """The field that a 400 names."""
    status, answer = server.post(path, body)
    assert status == 400, answer
    return answer["error"]["param"]


@pytest.mark.field("ChatCompletionRequest.model|user|request_id|return_tokens_as_token_ids|return_token_ids")
def test_fields_of_chat_and_completions(server: LiveServer) -> None:
    body = CHAT | {"request_id": "mine", "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
    answer = answer_of(server, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert answer["id"] == "chatcmpl-mine"
    assert answer["prompt_token_ids"] == list(b"user: a;assistant:")
    assert choice["token_ids"] == list(b";<")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:59", "token_id:60"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[59], [60]]
    assert server.post("/v1/chat/completions", CHAT | {"model": "other"})[0] == 404


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.cache_salt")
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_prefixes_are_cached_per_salt(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    if "prompt" in body:
        body = body | {"prompt": "0123456789abcdef"}

    def cached(salt: str) -> int:
        usage = answer_of(server, path, body | {"cache_salt": salt})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(f"{path} 1"), cached(f"{path} 2")] == [0, 0]
    assert cached(f"{path} 1") > 0


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.priority")
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_priority_reaches_the_scheduler(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    assert param_of(server, path, body | {"priority": 3}) == "priority"
    with live_server("fake:slow", engine={"scheduling_policy": "priority", "max_num_seqs": 1}) as slow:
        first = slow.raw("POST", path, body | {"max_tokens": 20, "priority": 0})
        while not slow.llm.stats.running:
            pass
        late = slow.raw("POST", path, body | {"max_tokens": 40, "priority": 7})
        while slow.llm.num_unfinished < 2:
            pass
        assert answer_of(slow, path, body | {"max_tokens": 1, "priority": 1})
        assert slow.llm.num_unfinished == 1, "the later one of smaller priority went first"
        for connection in (first, late):
            connection.close()


@pytest.mark.field("CompletionRequest.add_special_tokens", "ChatCompletionRequest.add_special_tokens")
def test_add_special_tokens(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    special: list[bool] = []
    encode = Tokenizer.encode

    def noted(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        special.append(add_special_tokens)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    for path, body in BOTH:
        for value in (True, False):
            answer_of(server, path, body | {"add_special_tokens": value})
        answer_of(server, path, body)
    assert special == [True, False, True, True, False, False]


@pytest.mark.field("ChatCompletionRequest.chat_template_kwargs|documents")
def test_template_kwargs_and_documents() -> None:
    template = "{{ mood }}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    with live_server(chat_template=template) as server:
        body = CHAT | {"chat_template_kwargs": {"mood": "m"}, "documents": [{"text": "pq"}], "return_token_ids": True}
        assert answer_of(server, "/v1/chat/completions", body)["prompt_token_ids"] == list(b"mpq")


def test_logprobs_of_the_whole_vocabulary_are_refused(server: LiveServer) -> None:
    status, answer = server.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1})
    assert status == 400
    assert "-1 (the whole vocabulary) is above" in answer["error"]["message"]


@pytest.mark.field("ChatCompletionRequest.max_completion_tokens")
def test_max_completion_tokens(server: LiveServer) -> None:
    body = {"messages": CHAT["messages"], "max_completion_tokens": 3}
    assert answer_of(server, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 3


@pytest.mark.field("CompletionRequest|ChatCompletionRequest|SamplingParams.truncation_side")
@pytest.mark.parametrize(("side", "kept"), [("left", "yz"), ("right", "wx"), (None, "yz")])
def test_truncation_side(server: LiveServer, side: str | None, kept: str) -> None:
    fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    answer = answer_of(server, "/v1/completions", {"prompt": "wxyz", "max_tokens": 1} | fields)
    assert answer["choices"][0]["prompt_token_ids"] == list(kept.encode())
    chat = answer_of(server, "/v1/chat/completions", CHAT | fields)
    assert chat["prompt_token_ids"] == list(b"us" if side == "right" else b"t:")


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.logprob_token_ids", "SamplingParams.logprob_token_ids")
def test_logprob_token_ids(server: LiveServer) -> None:
    fields = {"logprob_token_ids": [100, 98, 97]}
    answer = answer_of(server, "/v1/completions", TEXT | fields | {"logprobs": 1})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [
        {"b": -1.0, "d": -3.0, "a": -257.0},
        {"c": -2.0, "d": -3.0, "b": -258.0, "a": -257.0},
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 0}
    chat = answer_of(server, "/v1/chat/completions", body | fields)
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert {each["token"] for each in entry["top_logprobs"]} == {";", "a", "b", "d"}
    for path, least in BOTH:
        assert param_of(server, path, least | fields) == "logprob_token_ids"
    assert param_of(server, "/v1/completions", TEXT | {"logprobs": 1, "logprob_token_ids": [257]}) == (
        "logprob_token_ids[0]"
    )


@pytest.mark.field(
    "CompletionRequest|ChatCompletionRequest.repetition_detection", "SamplingParams.repetition_detection"
)
@pytest.mark.parametrize("stream", [False, True])
def test_repetition_detection(stream: bool) -> None:
    detection = {"repetition_detection": {"max_pattern_size": 30, "min_count": 2}}
    with live_server("fake:slow") as server:
        for path, body in BOTH:
            fields = body | {"max_tokens": 60 - 18, "ignore_eos": True} | detection
            if stream:
                choices = [chunk["choices"][0] for chunk in chunks_of(server, path, fields)]
                count = sum(len(c.get("text", c.get("delta", {}).get("content")) or "") for c in choices)
            else:
                choices = answer_of(server, path, fields)["choices"]
                count = len(choices[0].get("text") or choices[0]["message"]["content"])
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("repetition", "repetition_detected")
            assert count == 40, "the letters repeat after twenty"
        assert param_of(server, "/v1/completions", TEXT | {"repetition_detection": {"max_pattern_size": 2}}) == (
            "repetition_detection"
        )
        while server.llm.stats.kv_blocks_used:
            pass


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.best_of")
def test_best_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine's outputs are equal; their reported log-probabilities are made to differ."""
    with live_server() as server:
        for path, body in BOTH:
            fields = body | {"best_of": 4, "n": 2, "temperature": 1.0}
            answer = answer_of(server, path, fields)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 8
            assert answer["choices"][0]["logprobs"] is None
            assert param_of(server, path, fields | {"stream": True}) == "best_of"
            assert param_of(server, path, fields | {"best_of": 1}) == "best_of"
            assert param_of(server, path, fields | {"best_of": 10**6}) == "best_of"


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.use_beam_search|length_penalty|early_stopping")
def test_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[BeamSearchParams] = []
    init = BeamSearch.__init__

    def noted(search: BeamSearch, params: BeamSearchParams, *rest: Any) -> None:
        searches.append(params)
        init(search, params, *rest)

    monkeypatch.setattr(BeamSearch, "__init__", noted)
    fields = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": True}
    with live_server() as server:
        for path, body in BOTH:
            answer = answer_of(server, path, body | fields)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
            assert len(set(texts)) == 3
            assert all(len(text) == 2 for text in texts)
            assert answer["usage"]["completion_tokens"] == 6
            assert searches[-1] == BeamSearchParams(beam_width=3, max_tokens=2, length_penalty=0.5, early_stopping=True)
            for extra in ({"stream": True}, {"temperature": 0.7}, {"top_p": 0.5}, {"stop": ["x"]}, {"best_of": 3}):
                assert param_of(server, path, body | fields | extra) == next(iter(extra))
            assert param_of(server, path, body | fields | {"n": 11}) == "n"
            assert param_of(server, path, body | {"length_penalty": 0.5}) == "length_penalty"
            assert param_of(server, path, body | {"early_stopping": True}) == "early_stopping"
        many = answer_of(server, "/v1/completions", {"prompt": ["a", "kl"], "max_tokens": 3} | fields)
        assert [choice["index"] for choice in many["choices"]] == list(range(6))
        assert not server.llm.num_unfinished
        assert server.llm.stats.kv_blocks_used == 0


def test_beam_search_needs_probabilities() -> None:
    with live_server(engine={"logprobs_mode": "raw_logits"}) as server:
        assert param_of(server, "/v1/completions", TEXT | {"use_beam_search": True}) == "use_beam_search"


# --- cache hints ---

MARKED = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
SAID = [{"role": "user", "content": "a"}]
HINTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "prompt_cache_key": "one"}, "one"),
    ("/v1/completions", {"prompt": "a", "session_id": "one", "user": "two"}, "one"),
    ("/v1/completions", {"prompt": "a", "user": "one"}, "one"),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "prompt_cache_key": "one"}, "one"),
    ("/v1/chat/completions", {"messages": SAID, "prompt_cache_key": "one", "session_id": "two"}, "one"),
    ("/v1/chat/completions", {"messages": SAID, "session_id": "one"}, "one"),
    ("/v1/chat/completions", {"messages": SAID}, ""),
    ("/v1/chat/completions/batch", {"messages": [SAID], "prompt_cache_key": "one", "session_id": "two"}, "one"),
    ("/v1/chat/completions/batch", {"messages": [SAID], "session_id": "one"}, "one"),
    ("/v1/responses", {"input": "a", "prompt_cache_key": "one", "session_id": "two"}, "one"),
    ("/v1/responses", {"input": "a", "session_id": "one", "safety_identifier": "two"}, "one"),
    ("/v1/responses", {"input": "a", "user": "one"}, "one"),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1, "metadata": {"user_id": "one"}}, "one"),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1, "system": "one"}, ""),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1, "system": "one", "cache_control": {}}, "one"),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1, "system": [MARKED]}, "one"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [MARKED]}], "max_tokens": 1}, "one"),
]


@pytest.mark.field("CompletionRequest|ChatCompletionRequest|BatchChatCompletionRequest.prompt_cache_key|session_id")
@pytest.mark.field("ResponsesRequest.prompt_cache_key|session_id", "AnthropicMessagesRequest.metadata|cache_control")
@each_row(("path", "body", "hint"), HINTED)
def test_cache_hints_are_the_requests_cache_key(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], hint: str
) -> None:
    keys = []
    submit = server.llm.submit

    def noted(*args: Any, origin: RequestOrigin, **options: Any) -> Any:
        keys.append(origin.cache_key)
        return submit(*args, origin=origin, **options)

    with monkeypatch.context() as patch:
        patch.setattr(server.llm, "submit", noted)
        status, answer = server.post(path, {"model": "fake", "max_tokens": 1} | body)
    assert status == 200, answer
    assert {*keys} == {cache_key_of(hint)}


def test_cached_tokens_are_reported_to_those_that_give_a_cache_key() -> None:
    with live_server() as server:
        for more in ({}, {"user": "a"}, {"session_id": "a"}, {"prompt_cache_key": "a"}):
            whole = answer_of(server, "/v1/completions", TEXT | more)
            last = chunks_of(server, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}} | more)[
                -1
            ]
            for usage in (whole["usage"], last["usage"]):
                assert (usage.get("prompt_tokens_details") is not None) == ("user" not in more and more != {})


def test_a_long_cache_hint_is_refused(server: LiveServer) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", {"model": "fake", "messages": SAID})):
        for name in ("prompt_cache_key", "session_id", "user"):
            assert param_of(server, path, body | {name: "x" * 1_000_000}) == name


def test_cache_keys_of_owners_differ() -> None:
    assert cache_key_of(None) == cache_key_of("", "owner") == ""
    keys = {cache_key_of(hint, owner) for hint in ("one", "two") for owner in ("", "a", "b")}
    assert len(keys) == 6
