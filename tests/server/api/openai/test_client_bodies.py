"""Bodies as real clients send them: each is answered, and its parts without effect are named in x-pagoda-ignored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

BODIES = json.loads((Path(__file__).parents[3] / "data" / "client_bodies.json").read_text(encoding="utf-8"))
TEMPLATE = "{{ messages | length }}{% for t in tools or [] %}{{ t.function.name[:4] }}{% endfor %}assistant:"
"""Short prompts: the context of the fake engine is 64 tokens."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_auto_tool_choice=True, tool_call_parser="hermes", chat_template=TEMPLATE) as server:
        yield server


@each_row("row", BODIES, ids=lambda row: row["client"])
def test_bodies_of_clients_are_answered(server: LiveServer, row: dict[str, Any]) -> None:
    answer = server.response("POST", row["path"], {**row["body"], "model": "fake"})
    assert answer.status == 200, answer.body
    names = answer.headers.get("x-pagoda-ignored", "")
    assert set(filter(None, names.split(", "))) == set(row["ignored"])
    if row["body"].get("stream") is True:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer.body
    else:
        assert json.loads(answer.body)["choices"][0]["finish_reason"]


def test_there_are_many_clients() -> None:
    assert len(BODIES) >= 60
