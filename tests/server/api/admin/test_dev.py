"""Routes of --server-dev-mode: pause, abort, caches, settings without secrets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.engine.incident.files import read_snapshot
from pagoda.server.api.admin.unsupported_routes import UNSUPPORTED, UNSUPPORTED_DEV

TEXT = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
def slow() -> Iterator[LiveServer]:
    with live_server("fake:slow", server_dev_mode=True) as server:
        yield server


def answer_in_thread(server: LiveServer, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a request in a thread; return the thread and a list for its response."""
    responses: list[Any] = []
    thread = threading.Thread(target=lambda: responses.append(server.post("/v1/completions", body)))
    before = server.state.running
    thread.start()
    while server.state.running == before:
        pass
    return thread, responses


def ended(thread: threading.Thread) -> None:
    thread.join(60)
    assert not thread.is_alive()


def test_requests_wait_while_the_server_is_paused(slow: LiveServer) -> None:
    assert slow.get("/is_paused") == (200, {"is_paused": False})
    assert slow.post("/pause", None) == (200, {"status": "paused"})
    assert slow.get("/is_paused") == (200, {"is_paused": True})
    thread, responses = answer_in_thread(slow, TEXT)
    assert slow.get("/health")[0] == 200
    assert slow.llm.num_unfinished == 0
    assert responses == []
    assert slow.post("/resume", None) == (200, {"status": "resumed"})
    ended(thread)
    assert responses[0][0] == 200


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_in_flight_requests_are_aborted_or_finished(slow: LiveServer, mode: str, reason: str) -> None:
    thread, responses = answer_in_thread(slow, TEXT | {"max_tokens": 20})
    while not slow.llm.num_unfinished:
        pass
    assert slow.post(f"/pause?mode={mode}", None)[0] == 200
    assert slow.llm.num_unfinished == 0
    ended(thread)
    assert responses[0][1]["choices"][0]["finish_reason"] == reason
    assert slow.post("/pause?mode=freeze", None)[1]["error"]["param"] == "mode"


def test_in_flight_requests_are_kept(slow: LiveServer) -> None:
    thread, responses = answer_in_thread(slow, TEXT | {"max_tokens": 20})
    while not slow.llm.num_unfinished:
        pass
    assert slow.post("/pause?mode=keep", None)[0] == 200
    assert (slow.llm.num_unfinished, responses, slow.get("/health")[0]) == (1, [], 200)
    assert slow.post("/resume", None)[0] == 200
    ended(thread)
    assert responses[0][1]["choices"][0]["finish_reason"] == "length"


def test_a_disconnect_while_paused_frees_the_request(slow: LiveServer) -> None:
    slow.post("/pause", None)
    connection = slow.raw("POST", "/v1/completions", TEXT)
    while not slow.state.running:
        pass
    connection.close()
    while slow.state.running:
        pass
    slow.post("/resume", None)
    assert slow.post("/v1/completions", TEXT)[0] == 200


@pytest.mark.field("AbortRequest.request_ids")
@pytest.mark.parametrize("name", ["mine", "cmpl-mine"])
def test_requests_are_aborted_by_id(slow: LiveServer, name: str) -> None:
    thread, responses = answer_in_thread(slow, TEXT | {"max_tokens": 50, "request_id": "mine", "n": 2})
    other, kept = answer_in_thread(slow, TEXT | {"max_tokens": 20, "request_id": "mine-too"})
    while slow.llm.num_unfinished < 2:
        pass
    assert slow.post("/abort_requests", {"request_ids": ["unknown", name]}) == (200, b"")
    ended(thread)
    ended(other)
    assert {choice["finish_reason"] for choice in responses[0][1]["choices"]} == {"abort"}
    assert kept[0][1]["choices"][0]["finish_reason"] == "length"


def test_cache_resets_and_world_size(slow: LiveServer) -> None:
    assert slow.post("/reset_prefix_cache", None) == (200, {"success": True})
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert slow.post(path, None) == (200, b"")
    assert slow.get("/get_world_size") == (200, {"world_size": 1})


def test_settings_are_shown_without_secrets() -> None:
    with live_server(
        server_dev_mode=True, api_key=("sesame-open",), engine={"hf_token": "hf_abcdefgh", "max_num_seqs": 7}
    ) as server:
        key = {"authorization": "Bearer sesame-open"}
        for form in ("text", "json"):
            status, answer = server.get(f"/server_info?config_format={form}", **key)
            assert status == 200
            text = json.dumps(answer)
            assert "sesame" not in text
            assert "hf_abcdefgh" not in text
            assert "max_num_seqs" in text
        assert answer["vllm_config"]["engine"]["scheduler"]["max_num_seqs"] == 7
        assert server.get("/server_info?config_format=yaml", **key)[0] == 400


@each_row(("route", "why"), list((UNSUPPORTED | UNSUPPORTED_DEV).items()))
def test_unsupported_routes(route: tuple[str, str], why: str) -> None:
    method, path = route
    with live_server(server_dev_mode=True) as server:
        status, answer = server.request(method, path, None if method == "GET" else {})
        assert status == 501
        assert answer["error"]["message"] == f"{path} is not supported: {why}"
        assert answer["error"]["type"] == "server_error"


def test_development_routes_need_the_flag() -> None:
    with live_server() as server:
        for method, path in [
            ("POST", "/pause"),
            ("POST", "/abort_requests"),
            ("GET", "/server_info"),
            ("POST", "/sleep"),
            *UNSUPPORTED_DEV,
        ]:
            assert server.request(method, path, None if method == "GET" else {})[0] == 404, path


def test_incident_snapshot_is_written(tmp_path: Path) -> None:
    with live_server(server_dev_mode=True, engine={"incident_dir": str(tmp_path)}) as server:
        status, answer = server.post("/incident_snapshot", {})
        assert (status, Path(answer["path"]).parent) == (200, tmp_path)
        assert read_snapshot(Path(answer["path"])).cause == "on demand"
