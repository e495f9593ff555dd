"""Responses and Messages from engine tokens to the client: reasoning, text and a tool call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.servers.live_server import LiveServer, live_server

SAID = 'so é</think>\n\nIt is <tool_call>\n{"name": "f", "arguments": {"a": "𝄞"}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CUSTOM = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = {"reasoning_parser": "deepseek_r1"}
    with live_server("fake:say", engine=engine, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


def test_responses_api(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tools: Any = [TOOL]
    whole = client.responses.create(model="fake", input=f"[[{SAID}]]", tools=tools)
    with client.responses.stream(model="fake", input=f"[[{SAID}]]", tools=tools) as stream:
        final = stream.get_final_response()
    for response in (whole, final):
        reasoning, message, call = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "so é"
        assert message.type == "message"
        assert response.output_text.strip() == "It is"
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("f", '{"a": "𝄞"}')
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len("so é".encode())
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    later = client.responses.create(model="fake", input=output, previous_response_id=final.id)
    assert later.usage is not None
    assert later.usage.input_tokens > final.usage.input_tokens


def test_responses_of_a_model_with_a_format_of_its_own() -> None:
    said = (
        "<|channel|>analysis<|message|>so é<|end|><|start|>assistant<|channel|>commentary<|message|>It is<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "𝄞"}'
    )
    tools: Any = [TOOL]
    with live_server("fake:harmony") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client.responses.stream(model="fake", input=f"[[{said}]]", tools=tools) as stream:
            final = stream.get_final_response()
        for response in (client.responses.create(model="fake", input=f"[[{said}]]", tools=tools), final):
            reasoning, _, call = response.output
            assert reasoning.type == "reasoning"
            assert reasoning.content is not None
            assert (reasoning.content[0].text, response.output_text) == ("so é", "It is")
            assert call.type == "function_call"
            assert (call.name, call.arguments) == ("f", '{"a": "𝄞"}')


def test_logprobs_match_the_visible_text(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(
        model="fake", input="[[why</think>é!]]", include=["message.output_text.logprobs"]
    )
    (part,) = response.output[-1].content  # type: ignore[union-attr,misc]
    assert part.text == "é!"
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == "é!"


def test_messages_api(server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": f"[[{SAID}]]"}],
        "tools": [CUSTOM],
    }
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    for message in (client.messages.create(**ask), final):
        thinking, text, use = message.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, bool(thinking.signature)) == ("so é", True)
        assert text.type == "text"
        assert text.text.strip() == "It is"
        assert use.type == "tool_use"
        assert (use.name, use.input) == ("f", {"a": "𝄞"})
        assert message.stop_reason == "tool_use"


def test_disabled_thinking_is_not_shown(server: LiveServer) -> None:
    """The model's template has no variable that disables thinking."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = client.messages.with_raw_response.create(
        model="fake",
        max_tokens=400,
        messages=[{"role": "user", "content": "[[<think>so</think>a]]"}],
        thinking={"type": "disabled"},
    )
    assert message.headers["x-pagoda-ignored"] == "thinking"
    assert [block.type for block in message.parse().content] == ["text"]
