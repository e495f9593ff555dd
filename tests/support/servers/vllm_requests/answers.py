"""What a server answered, as the tables of vLLM's requests see it.

Paths are relative to the JSON body unless they begin with `status`, `headers` or `raw`; `*` stands for every element,
of which there must be one. The body of an event stream is what `fold` makes of it.
"""

from __future__ import annotations

import json
from typing import Any

from support.servers.live_server import Answer

Views = list[dict[str, Any]]
"""The answers so far, each with `status`, `headers`, `raw` and `body`."""

MISSING = object()


def view(answer: Answer) -> dict[str, Any]:
    """Return an answer as paths see it."""
    kind = answer.headers.get("content-type", "")
    body: Any = None
    if kind.startswith("application/json") and answer.body:
        body = json.loads(answer.body)
    elif kind.startswith("text/event-stream"):
        body = fold(answer.body.decode())
    raw = answer.body.decode(errors="replace")
    return {"status": answer.status, "headers": answer.headers, "raw": raw, "body": body}


def fold(text: str) -> dict[str, Any]:
    """Return the events of a stream, and of chat and completion chunks what they add up to per choice."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    folded: dict[str, Any] = {
        "chunks": chunks,
        "done": bool(lines) and lines[-1] == "[DONE]",
        "types": [chunk.get("type") for chunk in chunks],
        "choices": choices,
        "texts": {},
        "reasoning": {},
        "reasons": [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        "calls": [],
        "roles": [],
        "token_ids": [],
    }
    for choice in choices:
        delta, index = choice.get("delta", {}), str(choice["index"])
        said = choice.get("text") or delta.get("content") or ""
        folded["texts"][index] = folded["texts"].get(index, "") + said
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        folded["reasoning"][index] = folded["reasoning"].get(index, "") + thought
        folded["roles"] += [delta["role"]] if delta.get("role") else []
        folded["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or []:
            add_call(folded["calls"], call)
    return folded


def add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a piece of a tool call."""
    while len(calls) <= call["index"]:
        calls.append({"id": "", "name": "", "arguments": "", "names": 0})
    into, function = calls[call["index"]], call.get("function") or {}
    into["id"] += call.get("id") or ""
    into["name"] += function.get("name") or ""
    into["names"] += bool(function.get("name"))
    into["arguments"] += function.get("arguments") or ""


def values_at(one: dict[str, Any], path: str) -> list[Any]:
    """Return the values at a path: one, or with `*` one per element; MISSING where there is none."""
    first, _, rest = path.partition(".")
    if first in ("status", "headers", "raw"):
        places, values = rest.split(".") if rest else [], [one[first]]
    else:
        places, values = path.split(".") if path else [], [one["body"]]
    for place in places:
        values = [found for value in values for found in step_into(value, place)]
    return values or [MISSING]


def step_into(value: Any, place: str) -> list[Any]:
    if isinstance(value, list):
        if place == "*":
            return value
        number = int(place)
        return [value[number]] if -len(value) <= number < len(value) else [MISSING]
    if isinstance(value, dict):
        return list(value.values()) if place == "*" else [value.get(place, MISSING)]
    return [MISSING]


def value_at(views: Views, path: str) -> Any:
    """Return the value at `number.path`, the number being that of the answer."""
    number, _, rest = path.partition(".")
    return values_at(views[int(number)], rest)[0]
