"""Stream events whose frame is encoded once: the same bytes as when encoded whole, for any text and id."""

from __future__ import annotations

import json

from support.servers.live_server import live_server
from support.suite.rows import each_row

from pagoda.server.http.response import TextEvent, event

TEXTS = ["a", "", '"', "\\", "\n", "\u2028", "é", "\U0001f600", "\ufdd0", '"\ufdd0"', "</script>", "\x00"]
IDS = ["x", "\ufdd0", '"\ufdd0"', '\\"', "}{"]


@each_row("own", IDS)
def test_text_events_equal_whole_events(own: str) -> None:
    def chunk(text: str) -> dict:
        return {"id": f"cmpl-{own}", "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None}]}

    encoded = TextEvent(chunk)
    assert [encoded(text) for text in TEXTS] == [event(chunk(text)) for text in TEXTS]
    assert event(encoded("a")) == encoded("a")


@each_row("path", ["/v1/completions", "/v1/chat/completions"])
@each_row("own", IDS)
def test_streamed_equals_whole(path: str, own: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body |= {"request_id": own, "n": 2, "max_tokens": 4}

    def text_of(choice: dict) -> str:
        return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""

    with live_server("fake:slow") as server:
        whole = server.post(path, body)[1]
        raw = server.post(path, body | {"stream": True})[1].decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line.startswith("data: {")]
    assert {each["id"] for each in events} == {whole["id"]}
    keys = {tuple(choice) for each in events for choice in each["choices"] if choice["finish_reason"] is None}
    assert len(keys) == 1, "every chunk but the last has the same keys"
    for choice in whole["choices"]:
        parts = [each for chunk in events for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(map(text_of, parts)) == text_of(choice)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_continuous_usage_is_in_every_chunk() -> None:
    body = {"prompt": "a", "max_tokens": 12, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with live_server("fake:slow") as server:
        raw = server.post("/v1/completions", body)[1].decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line.startswith("data: {")]
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert len(set(counts)) > 2, "those between count too"
