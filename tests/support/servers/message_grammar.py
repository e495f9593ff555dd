"""Grammar of the stream events of a message."""

from __future__ import annotations

from typing import Any

from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
KINDS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def check_grammar(events: list[Any]) -> Any:
    """Fail unless the events form a valid stream; return the message as a client assembles it."""
    for event in events:
        EVENT.validate_python(event)
    start, *rest = events
    assert start["type"] == "message_start"
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    *blocks, last, stop = rest
    assert stop == {"type": "message_stop"}
    assert last["type"] == "message_delta"
    left = iter(blocks)
    for index, event in enumerate(left):
        assert (event["type"], event["index"]) == ("content_block_start", index)
        message["content"].append(block_of(event["content_block"], left, index))
    return message | last["delta"] | {"usage": last["usage"]}


def block_of(block: Any, rest: Any, index: int) -> Any:
    """Consume the events of one block and return the block."""
    texts = []
    for event in rest:
        assert event["index"] == index
        if event["type"] == "content_block_stop":
            break
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "signature_delta":
            block["signature"] = delta["signature"]
            continue
        assert delta["type"] == KINDS[block["type"]]
        assert "signature" not in block or not block["signature"], "the signature ends the thinking"
        texts.append(delta[DELTAS[delta["type"]]])
        assert texts[-1]
    text = "".join(texts)
    if block["type"] == "tool_use":
        assert block["input"] == {}
        block["input"] = from_json(text, allow_partial="trailing-strings") if text else {}
    else:
        block[block["type"]] += text
    return block


def plain(message: Any) -> Any:
    """Return the message with generated ids replaced."""
    for block in message["content"]:
        if str(block.get("id")).startswith("toolu_"):
            block["id"] = "made"
    return message
