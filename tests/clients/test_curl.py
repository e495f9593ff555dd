"""curl against the real server. Clients that have to be installed: test_programs.py."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

QUESTION = [{"role": "user", "content": "Say hello."}]
FEW = 8


def curl(server: str, path: str, body: dict, *more: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    words = ["curl", "-sSN", "--fail-with-body", server + path, "-H", "content-type: application/json"]
    done = subprocess.run([*words, *more, "-d", json.dumps(body)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_curl(server: str) -> None:
    chat = json.loads(curl(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": FEW}))
    assert chat["choices"][0]["message"]["content"]
    text = json.loads(curl(server, "/v1/completions", {"prompt": "Once", "max_tokens": FEW}))
    assert text["usage"]["completion_tokens"] <= FEW


def test_curl_streams(server: str) -> None:
    asked = {"messages": QUESTION, "max_tokens": FEW, "stream": True}
    events = curl(server, "/v1/chat/completions", asked).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(each["delta"].get("content", "") for each in deltas)
    assert deltas[-1]["finish_reason"] in ("stop", "length")
