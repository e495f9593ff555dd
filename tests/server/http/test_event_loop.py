"""No request holds the event loop for long, whatever its size: other requests keep streaming and /health answers.

The longest callback is measured in processor time of the loop's thread, so that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import fake_engine, memory
from support.live_server import LiveServer, live_server

MAX_SECONDS = 0.25


class LongestCallback:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = asyncio.Handle._run

    def timed(self, handle: asyncio.Handle) -> None:
        began = time.thread_time()
        self._run(handle)
        self.seconds = max(self.seconds, time.thread_time() - began)


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> LongestCallback:
    measured = LongestCallback()
    monkeypatch.setattr(asyncio.events.Handle, "_run", lambda handle: measured.timed(handle))
    return measured


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    memory.freeze()  # as the server does when it is ready
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "MAX_LEN", 65_536)
        with live_server("fake", engine={"max_num_seqs": 64, "max_num_queued_reqs": 8192}) as server:
            yield server


def messages(count: int) -> list[dict[str, str]]:
    return [{"role": "assistant" if index % 2 else "user", "content": "hi"} for index in range(count)]


BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]], int]] = {
    "batch": ("/v1/chat/completions/batch", lambda: {"messages": [messages(30)] * 1000, "max_tokens": 1}, 200),
    "n": ("/v1/completions", lambda: {"prompt": "a", "n": 4096, "max_tokens": 2, "logprobs": 5}, 200),
    "prompt logprobs": (
        "/v1/completions",
        lambda: {"prompt": [7] * 8000, "max_tokens": 1, "prompt_logprobs": 20},
        200,
    ),
    "prompts": ("/v1/completions", lambda: {"prompt": ["hi"] * 4096, "max_tokens": 1}, 200),
    "ids": ("/v1/completions", lambda: {"prompt": [7] * 2_000_000, "max_tokens": 1}, 400),
    "lists of ids": ("/v1/completions", lambda: {"prompt": [[7] * 400] * 4096, "max_tokens": 1}, 200),
    "text": ("/v1/completions", lambda: {"prompt": "hello " * 5_000_000, "max_tokens": 1}, 400),
    "messages": ("/v1/chat/completions", lambda: {"messages": messages(16_000), "max_tokens": 1}, 400),
    "items": (
        "/v1/responses",
        lambda: {"input": [{"role": "user", "content": "hi"}] * 16_000, "max_output_tokens": 1},
        400,
    ),
    "detokenize": ("/detokenize", lambda: {"tokens": [7] * 1_000_000}, 200),
}
"""Path, body and status of large requests."""


@pytest.mark.parametrize("name", BODIES)
def test_a_large_request_does_not_hold_the_event_loop(server: LiveServer, longest: LongestCallback, name: str) -> None:
    path, body, status = BODIES[name]
    raw = json.dumps(body()).encode()
    assert server.response("POST", path, raw).status == status
    assert longest.seconds < MAX_SECONDS


@pytest.mark.parametrize("kind", [False, True])
def test_logprobs_of_a_long_prompt_are_complete(server: LiveServer, kind: bool) -> None:
    body = {"prompt": [7, 8] * 200, "max_tokens": 3, "prompt_logprobs": 2, "echo": kind, "logprobs": 1}
    status, answer = server.post("/v1/completions", body)
    assert status == 200
    positions = answer["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    assert [next(iter(each)) for each in positions[1:]] == ["8", "7"] * 199 + ["8"]
    assert all(len(each) >= 2 for each in positions[1:])
