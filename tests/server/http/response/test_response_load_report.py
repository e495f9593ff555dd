"""The load header of responses, in both ORCA formats."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.servers.live_server import LiveServer, live_server

from pagoda.common.engine.messages import EngineStats
from pagoda.server.http.response import LOAD_FORMAT_HEADER, LOAD_HEADER, load_report

LOADED = EngineStats(waiting=3, kv_blocks_used=2, kv_blocks_total=5)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live


@pytest.mark.parametrize("form", ["TEXT", "text"])
def test_text(form: str) -> None:
    header = {LOAD_HEADER: "TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0"}
    assert load_report(form, LOADED) == header


def test_json() -> None:
    kind, _, header = load_report("JSON", LOADED)[LOAD_HEADER].partition(" ")
    assert kind == "JSON"
    assert json.loads(header) == {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}}


@pytest.mark.parametrize("form", [None, "", "BIN", "TEXT\t"])
def test_unknown_formats(form: str | None) -> None:
    assert load_report(form, LOADED) == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_whole_responses_have_the_header_on_request(server: LiveServer, path: str, body: dict[str, object]) -> None:
    answer = server.response("POST", path, {"max_tokens": 1} | body, {LOAD_FORMAT_HEADER: "JSON"})
    assert answer.status == 200
    assert json.loads(answer.headers[LOAD_HEADER].removeprefix("JSON "))["named_metrics"].keys() == {
        "kv_cache_usage_perc",
        "num_requests_waiting",
    }
    assert LOAD_HEADER not in server.response("POST", path, {"max_tokens": 1} | body).headers
