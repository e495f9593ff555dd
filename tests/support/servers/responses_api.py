"""Helpers for Responses API tests: a minimal request, clients, raw events."""

from __future__ import annotations

import json
from typing import Any

import openai
from support.servers.live_server import LiveServer

from pagoda.server.parsers.parser import Arguments, Content, Reasoning, ToolCall

ROUTES = "pagoda.server.api.openai.responses.route"
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
FULL = [Reasoning("so"), Content("hi"), ToolCall(0, "f", "c0"), Arguments(0, '{"a":'), Arguments(0, "1}")]
ASK: dict[str, Any] = {"model": "fake", "input": "a", "max_output_tokens": 5}


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def events_of(raw: bytes) -> list[Any]:
    """Parse a raw stream; fail unless each event is named by its type."""
    assert raw.endswith(b"\n\n")
    events = []
    for frame in raw.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def posted(server: LiveServer, **body: Any) -> Any:
    status, answer = server.post("/v1/responses", ASK | body)
    assert status == 200, answer
    return answer


def fault(server: LiveServer, **body: Any) -> tuple[Any, str]:
    """The field that a 400 names, and what it says."""
    status, answer = server.post("/v1/responses", ASK | body)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]
