"""Grammar of the stream events of a response."""

from __future__ import annotations

from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Type of a call -> its events and the key of its text. Other calls have no events of their own."""


def check_grammar(events: list[Any]) -> Any:
    """Fail unless the events form a valid stream; return the final response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    head = ["created", "queued", "in_progress"] if events[0]["response"]["background"] else ["created", "in_progress"]
    assert kinds[: len(head)] == head
    assert [event["response"]["output"] for event in events[: len(head)]] == [[]] * len(head)
    assert kinds[-1] in ("completed", "incomplete", "failed")
    last = events[-1]["response"]
    assert last["status"] == kinds[-1]
    rest = iter(events[len(head) : -1])
    items = [item_of(event, rest, index) for index, event in enumerate(rest)]
    assert last["output"] == items
    return last


def item_of(added: Any, rest: Any, index: int) -> Any:
    """Consume the events of one item after `added` and return the item."""
    assert added["type"] == "response.output_item.added"
    assert added["output_index"] == index
    item = added["item"]
    assert item["status"] == "in_progress"

    def expect(event: Any, kind: str) -> Any:
        assert event["type"] == f"response.{kind}"
        assert event["output_index"] == index
        assert event.get("item_id", item["id"]) == event.get("item", item)["id"] == item["id"]
        return event

    part = PARTS.get(item["type"])
    stem, key = (part, "text") if part else CALLS.get(item["type"], ("", ""))
    if not stem:
        final = expect(next(rest), "output_item.done")["item"]
        assert final["status"] in ("completed", "incomplete")
        return final
    if part:
        opened = expect(next(rest), "content_part.added")
        assert (opened["part"]["type"], opened["part"]["text"], opened["content_index"]) == (part, "", 0)
    deltas, event = [], next(rest)
    while event["type"] == f"response.{stem}.delta":
        deltas.append(expect(event, f"{stem}.delta")["delta"])
        event = next(rest)
    done = expect(event, f"{stem}.done")
    assert done[key] == "".join(deltas)
    assert all(deltas)
    if part:
        closed = expect(next(rest), "content_part.done")["part"]
        assert closed["text"] == done["text"]
    final = expect(next(rest), "output_item.done")["item"]
    assert final["status"] in ("completed", "incomplete")
    if part:
        assert final["content"] == [closed]
    else:
        assert (final[key], final["name"], final["call_id"]) == (
            done[key],
            done.get("name", item["name"]),
            item["call_id"],
        )
    return final


def plain(response: Any) -> Any:
    """Return the response with generated ids and times replaced."""
    for number, item in enumerate(response["output"]):
        item["id"] = number
        if str(item.get("call_id")).startswith("call_"):
            item["call_id"] = "made"
    return response | {"completed_at": None}
