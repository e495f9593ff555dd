"""Special tokens in chat messages are ordinary text on every way that leads to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.checkpoints.byte_text import EOS
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api import chat_prompt
from pagoda.server.api.chat_prompt import Conversation, prepare

TEXT = "a<eos>b"
CHAT = [{"role": "user", "content": TEXT}]
PROMPT = "user: a<eos>b;assistant:"
PARSED = [*b"user: a", EOS, *b"b;assistant:"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def tokens(server: LiveServer, messages: Any, **more: Any) -> list[int]:
    status, answer = server.post("/tokenize", {"messages": messages, **more})
    assert status == 200, answer
    return answer["tokens"]


@pytest.mark.setting("--special-tokens-in-messages")
def test_parse_makes_them_control_tokens(server: LiveServer) -> None:
    with live_server(engine={"special_tokens_in_messages": "parse"}) as parses:
        assert tokens(parses, CHAT) == PARSED
        assert tokens(server, CHAT) == list(PROMPT.encode())


@each_row(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": CHAT}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/chat/completions/render", {"messages": CHAT}),
        ("/tokenize", {"messages": CHAT}),
    ],
)
def test_every_route_takes_them_literally(
    server: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    encode = chat_prompt.encode_kept
    monkeypatch.setattr(chat_prompt, "encode_kept", lambda *args: made.append(encode(*args)) or made[-1])
    limits = {} if "tokenize" in path or "count" in path else {"max_tokens": 2}
    if "responses" in path:
        limits = {"max_output_tokens": 16}
    status, answer = server.post(path, {"model": "fake", **limits, **body})
    assert status == 200, answer
    assert made
    assert all(ids == list(PROMPT.encode()) for ids in made)


def test_prompts_of_completions_are_parsed(server: LiveServer) -> None:
    _, answer = server.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert answer["tokens"] == [*b"a", EOS, *b"b"]
    _, answer = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == 3


def test_token_strings_spell_the_text(server: LiveServer) -> None:
    _, answer = server.post("/tokenize", {"messages": CHAT, "return_token_strs": True})
    assert "".join(answer["token_strs"]).replace("\u0120", " ") == PROMPT


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 14}, {"truncate_prompt_tokens": 16}])
def test_rendered_prompts_have_the_offsets_of_their_tokens(server: LiveServer, more: dict[str, Any]) -> None:
    body = {"messages": CHAT, "return_token_offsets": True, "return_prompt_text": True, **more}
    status, answer = server.post("/v1/chat/completions/render", body)
    assert status == 200
    spelt = [PROMPT[start:end] for start, end in answer["token_offsets"]]
    assert "".join(spelt).encode() == bytes(answer["token_ids"])
    assert answer["prompt_text"] == PROMPT


@each_row("keep", [3, 14, 15, 18, 23, 24])
@each_row("side", ["left", "right"])
@each_row("special", [True, False])
def test_truncated_prompts_are_the_end_of_the_whole(server: LiveServer, keep: int, side: str, special: bool) -> None:
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
    conversation = Conversation(messages=CHAT, add_special_tokens=special)
    prompt = server.call(prepare(server.state, conversation, params))
    whole = list(PROMPT.encode())
    assert prompt.token_ids == (whole[-keep:] if side == "left" else whole[:keep])
    assert prompt.text == PROMPT


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_conversations_are_cut_first(server: LiveServer, side: str) -> None:
    """Of texts of more than 262,144 characters only a part is tokenised."""
    text = "<eos>" + "x" * 200_000 + "<eos>" + "y" * 200_000 + "<eos>"
    params = SamplingParams(truncate_prompt_tokens=40, truncation_side=side)
    prompt = server.call(prepare(server.state, Conversation(messages=[{"role": "user", "content": text}]), params))
    whole = f"user: {text};assistant:".encode()
    assert prompt.token_ids == list(whole[-40:] if side == "left" else whole[:40])


def test_answers_of_a_model_are_parsed_and_results_of_tools_are_not(server: LiveServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s<eos>"},
        {"role": "assistant", "content": "a<eos>", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t<e"}, "os>"][:1]},
        {"role": "user", "content": [{"type": "text", "text": "u<eos>"}]},
    ]
    ids = tokens(server, messages)
    assert ids.count(EOS) == 2
    assert bytes(id for id in ids if id != EOS).count(b"<eos>") == 1


def test_a_deep_message_is_refused_and_the_next_is_served(server: LiveServer) -> None:
    deep: Any = TEXT
    for _ in range(150):
        deep = [deep]
    status, _ = server.post("/tokenize", {"messages": [{"role": "user", "content": TEXT, "extra": deep}]})
    assert status in (200, 400)
    assert EOS not in tokens(server, CHAT)
