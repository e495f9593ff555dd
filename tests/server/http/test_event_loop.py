"""No request holds the event loop for long, whatever its size: other requests keep streaming and /health answers.

The longest callback is measured in processor time of the loop's thread, so that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import pydoc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engines import fake_engine
from support.servers.live_server import LiveServer, live_server
from support.suite import memory

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
        with live_server(
            "fake", engine={"max_num_seqs": 64, "max_num_queued_reqs": 8192, "max_logprobs": -1}
        ) as server:
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
    "all logprobs": (
        "/v1/completions",
        lambda: {"prompt": [7] * 250, "max_tokens": 1, "prompt_logprobs": -1, "echo": True, "logprobs": -1},
        200,
    ),
    "streamed logprobs": (
        "/v1/completions",
        lambda: {"prompt": [7] * 8000, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True},
        200,
    ),
    "bad words": (
        "/v1/completions",
        lambda: {"prompt": "a", "max_tokens": 1, "bad_words": [f"{index} " * 60 for index in range(4000)]},
        400,
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


@pytest.mark.parametrize(
    ("place", "body"),
    [
        (
            "pagoda.server.processing.output_processor.PendingLogprobs.convert",
            {"prompt": [7] * 9, "max_tokens": 1, "prompt_logprobs": -1},
        ),
        (
            "pagoda.server.api.openai.completion.TextCompletionBuilder.whole",
            {"prompt": [7], "max_tokens": 9, "logprobs": -1},
        ),
        (
            "pagoda.server.api.openai.completion.TextCompletionBuilder._echoed_logprobs",
            {"prompt": [7] * 9, "max_tokens": 1, "echo": True, "logprobs": -1, "stream": True},
        ),
        (
            "pagoda.server.processing.inputs.bad_words_token_ids",
            {"prompt": [7], "max_tokens": 1, "bad_words": [f"{index} word" for index in range(900)]},
        ),
    ],
)
def test_what_is_large_is_made_beside_the_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, place: str, body: dict[str, Any]
) -> None:
    """Few tokens with all of the vocabulary as candidates are large, and so are many bad words."""
    module, _, name = place.rpartition(".")
    holder = pydoc.locate(module)
    usual, on_loop = getattr(holder, name), list[bool]()

    def noted(*args: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return usual(*args)

    monkeypatch.setattr(holder, name, noted)
    assert server.post("/v1/completions", body)[0] == 200
    assert on_loop
    assert not any(on_loop)
