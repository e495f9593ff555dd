"""Texts far beyond the context, on every route: refused before tokenising, or truncated without tokenising all."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.watching import PATIENCE, eventually

from pagoda.common.text import tokenizer
from pagoda.common.text.tokenizer import Tokenizer

LONG = "a word, " * (tokenizer.MIN_CHAR_LIMIT // 8 + 1)
SAID = [{"role": "user", "content": LONG}]
CUT = {"truncate_prompt_tokens": 5}

GENERATING: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["a", LONG]}),
    ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}),
    ("/v1/completions", {"prompt": LONG, "use_beam_search": True, "n": 2}),
    ("/v1/completions/render", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/chat/completions/batch", {"messages": [SAID]}),
    ("/v1/chat/completions/render", {"messages": SAID}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": LONG, "truncation": "auto"}),
    ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": SAID}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": SAID}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": SAID}),
    ("/generative_scoring", {"query": LONG, "items": ["a"], "label_token_ids": [98]}),
    ("/generative_scoring", {"query": "a", "items": ["a", LONG], "label_token_ids": [98]}),
]
POOLING: list[tuple[str, str, Any]] = [
    ("embed", "/v1/embeddings", {"input": LONG}),
    ("embed", "/v1/embeddings", {"messages": SAID}),
    ("embed", "/v2/embed", {"texts": [LONG], "truncate": "NONE"}),
    ("embed", "/pooling", {"input": ["a", LONG]}),
    ("classify", "/classify", {"input": LONG}),
    ("cross", "/score", {"text_1": LONG, "text_2": "a"}),
    ("cross", "/rerank", {"query": "a", "documents": [LONG]}),
    ("embed", "/score", {"text_1": "a", "text_2": LONG}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that was tokenised."""
    lengths: list[int] = []
    encode, count = Tokenizer.encode, Tokenizer._count

    def noted(self: Tokenizer, text: str, *rest: Any) -> Any:
        ids = encode(self, text, *rest)
        lengths.append(len(text))
        return ids

    def counted(self: Tokenizer, text: str) -> int:
        lengths.append(len(text))
        return count(self, text)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(Tokenizer, "_count", counted)
    return lengths


def refused(server: LiveServer, path: str, body: Any, seen: list[int]) -> None:
    status, answer = server.post(path, body)
    assert status == 400
    if path.startswith("/v1/messages"):
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 63 maximum", answer["error"]["message"])
    else:
        assert "maximum context length is" in answer["error"]["message"]
        assert "the prompt is too long" in answer["error"]["message"]
        assert answer["error"].get("code") == "context_length_exceeded"
    assert max(seen, default=0) < tokenizer.CHUNK_CHARS


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_long_prompts_are_refused_before_tokenising(server: LiveServer, path: str, body: Any, seen: list[int]) -> None:
    refused(server, path, body, seen)


@pytest.mark.parametrize(("kind", "path", "body"), POOLING)
def test_long_pooling_inputs_are_refused_before_tokenising(kind: str, path: str, body: Any, seen: list[int]) -> None:
    with live_server(f"fake:pool-{kind}") as server:
        refused(server, path, body, seen)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": SAID}),
    ],
)
def test_truncated_prompts_are_tokenised_in_part(
    server: LiveServer, path: str, body: Any, side: str, seen: list[int]
) -> None:
    asked = body | CUT | {"truncation_side": side, "max_tokens": 1}
    assert server.post(path, asked)[1]["usage"]["prompt_tokens"] == 5
    assert sum(seen) < 4 * tokenizer.CHUNK_CHARS
    shown = server.post(f"{path}/render", asked | {"return_token_offsets": True})[1]
    shown = shown[0] if isinstance(shown, list) else shown
    text = LONG if "prompt" in body else f"user: {LONG};assistant:"
    kept = text[:5] if side == "right" else text[-5:]
    assert bytes(shown["token_ids"]).decode() == kept
    assert [text[begin:end] for begin, end in shown["token_offsets"]] == list(kept)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_pooling_inputs_are_tokenised_in_part(side: str, seen: list[int]) -> None:
    fields = CUT | {"truncation_side": side}
    with live_server("fake:pool-embed") as server:
        status, answer = server.post("/v1/embeddings", fields | {"input": LONG})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 5)
        assert sum(seen) < 8 * tokenizer.CHUNK_CHARS
    with live_server("fake:pool-cross") as server:
        status, answer = server.post("/score", fields | {"text_1": LONG, "text_2": LONG})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 5)


def test_oldest_turns_of_a_long_conversation_are_dropped(server: LiveServer) -> None:
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    fields = {"input": turns, "truncation": "auto", "max_output_tokens": 1}
    assert server.post("/v1/responses", fields)[1]["usage"]["input_tokens"] == len("user: c;assistant:")


def test_token_ids_are_counted_before_they_are_checked(server: LiveServer) -> None:
    status, answer = server.post("/v1/completions", {"prompt": [5] * 1_000_000})
    assert status == 400
    assert "the prompt is too long: 1000000 tokens" in answer["error"]["message"]


CHUNK_SECONDS = 0.05
LEAVING = [
    ("fake:endless", "/v1/completions", {"prompt": "TEXT"}),
    ("fake:endless", "/v1/completions", {"prompt": "TEXT", "add_special_tokens": False}),
    ("fake:endless", "/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
    ("fake:endless", "/v1/responses", {"input": "TEXT"}),
    (
        "fake:endless",
        "/v1/messages",
        {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "TEXT"}]},
    ),
    ("fake:endless", "/tokenize", {"prompt": "TEXT"}),
]


@pytest.mark.parametrize(("model", "path", "body"), LEAVING)
def test_tokenising_ends_when_the_client_leaves(
    model: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 30 chunks, whose tokens fit as far as they are counted."""
    seen: list[int] = []
    has_left = threading.Event()
    count = Tokenizer._count

    def slowly(self: Tokenizer, text: str) -> int:
        count(self, text[:1])
        seen.append(len(text))
        assert len(seen) < 2 or has_left.wait(PATIENCE)
        return 1

    monkeypatch.setattr(Tokenizer, "_count", slowly)
    text = "a" * (30 * tokenizer.CHUNK_CHARS)
    given = {name: _with_text(value, text) for name, value in body.items()}
    with live_server(model) as server:
        connection = server.sent(path, given, {"content-type": "application/json"})
        eventually(lambda: len(seen) >= 2)
        connection.close()
        eventually(lambda: not server._server.server_state.connections)
        server.settle()
        has_left.set()
        threads = server.llm.text_threads
        eventually(lambda: not threads._running)
        assert len(seen) < 18
        assert server.llm.num_unfinished == 0
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def _with_text(value: Any, text: str) -> Any:
    if isinstance(value, list):
        return [_with_text(each, text) for each in value]
    if isinstance(value, dict):
        return {name: _with_text(each, text) for name, each in value.items()}
    return text if value == "TEXT" else value
