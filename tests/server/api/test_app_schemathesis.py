"""Requests generated from the OpenAPI schema: all are answered, and the server keeps serving."""

from __future__ import annotations

import fuzz_api
import pytest
from support.servers.live_server import live_server

CASES = 150


def test_no_request_of_the_schema_is_a_server_error() -> None:
    with live_server(enable_tokenizer_info_endpoint=True) as server:
        canary = ("/v1/completions", {"prompt": "a", "max_tokens": 2})
        findings = fuzz_api.Fuzz(server.url, canary, timeout=120).run(CASES, seed=1)
        assert findings.failures == {}, findings.failures
        assert findings.cases > CASES // 2
        answered = {path for path, status in findings.responses if status == 200}
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models"} <= answered


def test_a_failing_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server() as server:

        def bug(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(server.state, "tokenizer", bug)
        findings = fuzz_api.Fuzz(server.url, ("/v1/completions", {"prompt": "a", "max_tokens": 1})).run(80, seed=1)
        assert any(": 500 " in kind for kind in findings.failures)
        assert any("plain request" in kind for kind in findings.failures)
