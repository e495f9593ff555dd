"""Request bodies of coding agents and agent libraries, recorded with their texts shortened (some are hand-written).

tests/data/agent_requests.jsonl has one per line, with what is expected: the parts named in x-pagoda-ignored, the
offered functions, the roles of the messages that reach the chat template and, for short ones, the messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.spying import spy_on

LINES = (Path(__file__).parents[2] / "data" / "agent_requests.jsonl").read_text(encoding="utf-8").splitlines()
RECORDS = [json.loads(line) for line in LINES]
ROUTES = {"responses": "pagoda.server.api.openai.responses.route", "messages": "pagoda.server.api.anthropic.messages"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


def test_there_are_enough_records() -> None:
    assert len({record["name"] for record in RECORDS}) == len(RECORDS) >= 25


@each_row("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_requests_of_agents_are_accepted(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]
) -> None:
    spy = spy_on(monkeypatch, next(route for api, route in ROUTES.items() if api in record["path"]))
    answer = server.response("POST", record["path"], record["body"])
    assert answer.status == 200, answer.body
    ignored = answer.headers.get("x-pagoda-ignored", "")
    assert sorted(filter(None, ignored.split(", "))) == record["ignored"]
    assert [tool["function"]["name"] for tool in spy.conversation.tools] == record["tools"]
    assert [message["role"] for message in spy.conversation.messages] == record["roles"]
    if "messages" in record:
        assert spy.conversation.messages == record["messages"]


def test_a_header_that_differs_in_every_request_is_not_shown_to_the_model(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = spy_on(monkeypatch, ROUTES["messages"])
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}]
    body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "system": system}
    assert server.post("/v1/messages", body)[0] == 200
    assert spy.conversation.messages[0] == {"role": "system", "content": "Be brief."}
