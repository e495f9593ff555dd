"""Tokenize, render, generative scoring and invocations routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.server.api.pooling import scoring
from pagoda.server.http import generation

USER = [{"role": "user", "content": "a"}]
PROMPT = "user: a;assistant:"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def answer_of(server: LiveServer, path: str, body: Any) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def param_of(server: LiveServer, path: str, body: Any) -> Any:
    status, answer = server.post(path, body)
    assert status == 400, answer
    return answer["error"]["param"]


@pytest.mark.field("TokenizeCompletionRequest.prompt|return_token_strs|model", "DetokenizeRequest.tokens|model")
def test_tokens_of_a_text_and_back(server: LiveServer) -> None:
    answer = answer_of(server, "/tokenize", {"prompt": "añ", "return_token_strs": True})
    assert answer == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [97, 195, 177],
        "token_strs": ["a", "\u00c3", "\u00b1"],  # as written in the vocabulary, which is unambiguous
    }
    assert answer_of(server, "/tokenize", {"prompt": "a"})["token_strs"] is None
    assert answer_of(server, "/tokenize", {"prompt": "a" * 100})["count"] == 100
    assert answer_of(server, "/detokenize", {"tokens": [97, 195, 177, 256]}) == {"prompt": "añ<eos>"}
    assert answer_of(server, "/detokenize", {"tokens": []}) == {"prompt": ""}
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert server.post(path, body | {"model": "other"})[0] == 404
    for bad in ([-1], [257], [10**30], ["a"], [True], 5):
        assert param_of(server, "/detokenize", {"tokens": bad}).partition("[")[0] == "tokens"


@pytest.mark.field("TokenizeCompletionRequest.add_special_tokens", "TokenizeChatRequest.add_special_tokens")
def test_special_tokens(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> None:
    from pagoda.common.text.tokenizer import Tokenizer

    calls: list[bool] = []
    encode = Tokenizer.encode

    def recorded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        calls.append(add_special_tokens)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    for body in ({"prompt": "a"}, {"messages": USER}):
        for value in (True, False):
            answer_of(server, "/tokenize", body | {"add_special_tokens": value})
        answer_of(server, "/tokenize", body)
    assert calls == [True, False, True, True, False, False]


@pytest.mark.field(
    "TokenizeChatRequest.messages|model|add_generation_prompt|continue_final_message|return_token_strs|chat_template"
    "|chat_template_kwargs|tools"
)
def test_tokens_of_a_conversation(server: LiveServer) -> None:
    def text(**fields: Any) -> str:
        answer = answer_of(server, "/tokenize", {"messages": USER, "return_token_strs": True} | fields)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        decoded: str = answer_of(server, "/detokenize", {"tokens": answer["tokens"]})["prompt"]
        return decoded

    assert text() == PROMPT
    assert text(add_generation_prompt=False) == "user: a;"
    messages = [*USER, {"role": "assistant", "content": "xy"}]
    assert text(messages=messages, continue_final_message=True, add_generation_prompt=False) == "user: a;assistant: xy"
    assert server.post("/tokenize", {"messages": USER, "model": "other"})[0] == 404
    assert param_of(server, "/tokenize", {"messages": USER, "chat_template": "x"}) == "chat_template"
    template = "{{ mood }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    with live_server(chat_template=template, trust_request_chat_template=True) as other:
        fields: dict[str, Any] = {
            "messages": USER,
            "chat_template_kwargs": {"mood": "m"},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        }
        assert answer_of(other, "/tokenize", fields)["tokens"] == list(b"mf")
        assert answer_of(other, "/tokenize", fields | {"chat_template": "{{ mood }}!"})["tokens"] == list(b"m!")


@each_row("body", [{}, {"messages": []}, {"prompt": 5}, {"messages": [{"content": "a"}]}, []])
def test_bad_tokenize_requests(server: LiveServer, body: Any) -> None:
    assert server.post("/tokenize", body)[0] == 400


def test_without_a_tokenizer() -> None:
    with live_server(engine={"skip_tokenizer_init": True}) as server:
        assert server.post("/tokenize", {"prompt": "a"})[0] == 400
        assert server.post("/detokenize", {"tokens": [1]})[0] == 400
        assert param_of(server, "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}) == (
            "query"
        )
        (shown,) = answer_of(server, "/v1/completions/render", {"prompt": [1, 2], "return_token_offsets": True})
        assert (shown["token_ids"], shown["token_offsets"]) == ([1, 2], None)


@pytest.mark.field("CompletionRequest.return_token_offsets")
def test_preview_of_completions(server: LiveServer) -> None:
    body = {"prompt": ["añb", "wxyz"], "max_tokens": 7, "temperature": 0.5, "stop": ["q"], "request_id": "mine"}
    first, second = answer_of(server, "/v1/completions/render", body | {"return_token_offsets": True, "priority": 0})
    assert first == {
        "request_id": "cmpl-mine-0",
        "model": "fake",
        "token_ids": [97, 195, 177, 98],
        "token_offsets": [[0, 1], [1, 2], [1, 2], [2, 3]],
        "sampling_params": {"temperature": 0.5, "stop": ["q"], "max_tokens": 7, "output_kind": 2},
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
    }
    assert second["token_ids"] == list(b"wxyz")
    for side, ids, offsets in (("left", b"yz", [[2, 3], [3, 4]]), ("right", b"wx", [[0, 1], [1, 2]])):
        fields = {"prompt": "wxyz", "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_offsets": True}
        (shown,) = answer_of(server, "/v1/completions/render", fields)
        assert (shown["token_ids"], shown["token_offsets"]) == (list(ids), offsets)
    assert param_of(server, "/v1/completions", {"prompt": "a", "return_token_offsets": True}) == "return_token_offsets"
    assert param_of(server, "/v1/completions/render", {"prompt": "a" * 100}) == "prompt"
    assert param_of(server, "/v1/completions/render", {"prompt": "a", "top_p": 3.0}) == "top_p"
    assert not server.llm.num_unfinished


@pytest.mark.field("ChatCompletionRequest.return_token_offsets")
def test_preview_of_a_conversation(server: LiveServer) -> None:
    body = {"messages": USER, "return_token_offsets": True, "return_prompt_text": True, "seed": 3}
    shown = answer_of(server, "/v1/chat/completions/render", body)
    assert shown["request_id"].startswith("chatcmpl-")
    assert shown["prompt_text"] == PROMPT
    assert shown["token_ids"] == list(PROMPT.encode())
    assert shown["token_offsets"] == [[i, i + 1] for i in range(len(PROMPT))]
    assert shown["sampling_params"]["seed"] == 3
    answered = answer_of(server, "/v1/chat/completions", {"messages": USER, "return_token_ids": True, "max_tokens": 1})
    assert answered["prompt_token_ids"] == shown["token_ids"]
    assert param_of(server, "/v1/chat/completions", body) == "return_token_offsets"
    assert param_of(server, "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a" * 99}]}) == (
        "messages"
    )


@pytest.mark.field(
    "GenerativeScoringRequest.model|query|items|label_token_ids|apply_softmax|item_first|add_special_tokens|cache_salt"
    "|priority|request_id"
)
def test_generative_scoring(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> None:
    """The fake engine's logprobs decrease by 1 from each letter to the next; its first token has -n."""
    calls: list[Any] = []
    submit = server.llm.submit

    async def recorded(request_id: str, prompt: Any, params: Any, priority: int = 0, **rest: Any) -> Any:
        calls.append((prompt["prompt_token_ids"], prompt["cache_salt"], priority))
        return await submit(request_id, prompt, params, priority, **rest)

    monkeypatch.setattr(server.llm, "submit", recorded)
    body = {"query": "ab", "items": ["c", "x"], "label_token_ids": [101, 100], "request_id": "mine", "cache_salt": "s"}
    answer = answer_of(server, "/generative_scoring", body)
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-mine", "list", "fake")
    assert calls == [(list(b"abc"), "s", 0), (list(b"abx"), "s", 0)]
    first = answer["data"][0]
    assert (first["index"], first["object"]) == (0, "score")
    assert first["score"] == pytest.approx(math.exp(-1) / (1 + math.exp(-1)))
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 8, "completion_tokens": 2}
    raw = answer_of(server, "/generative_scoring", body | {"apply_softmax": False})["data"][0]["score"]
    assert raw == pytest.approx(math.exp(-3 - 1))
    answer_of(server, "/generative_scoring", body | {"item_first": True})
    assert calls[-1][0] == list(b"xab")
    answer_of(server, "/generative_scoring", body | {"query": [1, 2], "items": [[3]], "add_special_tokens": False})
    assert calls[-1][0] == [1, 2, 3]
    for field, value in (("label_token_ids", [257]), ("label_token_ids", []), ("items", []), ("priority", 3)):
        assert param_of(server, "/generative_scoring", body | {field: value}).partition("[")[0] == field
    assert server.post("/generative_scoring", body | {"model": "other"})[0] == 404


def test_invocations(server: LiveServer) -> None:
    assert answer_of(server, "/invocations", {"prompt": "a", "max_tokens": 2})["choices"][0]["text"] == "bc"
    chat = answer_of(server, "/invocations", {"messages": USER, "max_tokens": 2})
    assert chat["choices"][0]["message"]["content"] == ";<"
    status, raw = server.post("/invocations", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert (status, raw.count(b"data: ")) == (200, raw.count(b"\n\n"))
    assert param_of(server, "/invocations", {"prompt": "a", "top_p": 3.0}) == "top_p"
    for bad, expected in (({}, "neither"), ({"other": 1}, "neither"), ([], "object"), (b"{", "JSON"), (b"", "JSON")):
        status, answer = server.post("/invocations", bad)
        assert (status, expected in answer["error"]["message"]) == (400, True)
    with live_server(max_body_bytes=100) as small:
        assert small.post("/invocations", {"prompt": "a" * 200})[0] == 413


def test_a_disconnect_from_invocations_frees_blocks() -> None:
    with live_server("fake:slow") as slow:
        connection = slow.raw("POST", "/invocations", {"prompt": "a", "max_tokens": 60})
        while not slow.llm.num_unfinished:
            pass
        connection.close()
        while slow.llm.num_unfinished:
            pass


def test_sequences_of_all_prompts_are_bounded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_SEQUENCES", 6)
    body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
    assert len(answer_of(server, "/v1/completions", body | {"n": 2})["choices"]) == 6
    assert param_of(server, "/v1/completions", body | {"n": 3}) == "n"
    assert param_of(server, "/v1/completions", body | {"best_of": 3}) == "best_of"
    assert param_of(server, "/v1/chat/completions/batch", {"messages": [USER] * 4, "n": 2}) == "n"


def test_generative_scoring_tokens_are_bounded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_TOKENS", 6)
    body = {"query": "ab", "label_token_ids": [97]}
    answer_of(server, "/generative_scoring", body | {"items": ["a", "b"]})
    assert param_of(server, "/generative_scoring", body | {"items": ["a", "b", "c"]}) == "items"


@each_row("path", ["audio/transcriptions", "audio/translations", "audio/speech", "images/generations", "images/edits"])
def test_audio_and_images_are_refused_by_name(path: str) -> None:
    with live_server() as server:
        for body, kind in (({}, "application/json"), (b"--x", "multipart/form-data; boundary=x")):
            status, answer = server.request("POST", f"/v1/{path}", body, {"content-type": kind})
            assert (status, answer["error"]["type"]) == (501, "server_error")
            assert f"/v1/{path} is not supported: this version serves text only" in answer["error"]["message"]
