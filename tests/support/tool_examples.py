"""Example outputs in every tool format, with their events, from `tests/data/tool_examples.json`.

An event is there a text, `{"reasoning": text}`, `{"call": name}` with an `id` where the format has one, or
`{"arguments": text}` of the call before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, Tool, ToolCall

TOOLS = (
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "place": {"$ref": "#/$defs/place"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
            },
            "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    ),
    Tool("now", {}),
)


@dataclass(frozen=True)
class Example:
    """An output in a format and its events."""

    format: str
    text: str
    events: tuple[Event, ...]


def _events(said: Iterable[Any]) -> tuple[Event, ...]:
    events: list[Event] = []
    calls = 0
    for each in said:
        match each:
            case {"call": name}:
                events.append(ToolCall(calls, name, each.get("id")))
                calls += 1
            case {"arguments": text}:
                events.append(Arguments(calls - 1, text))
            case {"reasoning": text}:
                events.append(Reasoning(text))
            case str():
                events.append(Content(each))
            case _:
                raise ValueError(each)
    return tuple(events)


_FILE: Final = Path(__file__).parents[1] / "data" / "tool_examples.json"
EXAMPLES: Final = [
    Example(each["format"], each["text"], _events(each["events"])) for each in json.loads(_FILE.read_text())
]
