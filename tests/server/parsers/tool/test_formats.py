"""Every tool format: parsed events, for every split and truncation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.suite.rows import each_row

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, Tool, ToolCall, merge_events
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

# --- the examples: an event is there a text, {"reasoning": text}, {"call": name}, or {"arguments": text} ---

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


_FILE: Final = Path(__file__).parents[3] / "data" / "tool_examples.json"
EXAMPLES: Final = [
    Example(each["format"], each["text"], _events(each["events"])) for each in json.loads(_FILE.read_text())
]


# --- tests ---


ALL = each_row("example", EXAMPLES, ids=[f"{each.format}-{n}" for n, each in enumerate(EXAMPLES)])
FORMATS = sorted(TOOL_FORMATS)
TAGGED_CONTENT = ("openai", "kimi_k3")
"""Formats whose content is tagged, too."""
NAMES = st.sampled_from(FORMATS)
MARKUP = (
    *"{}[]\"\\':,=()><f1\n é🗼｜",
    *("null", "\\u", "\\ud83d", "0x", '">', "```json", '"name"', '"arguments"', "functools", "call:", "to=functions."),
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "<tool_calls>", "</tool_calls>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<function=",
        "<parameter=",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "<|python_tag|>",
    ),
    *(
        '<invoke name="',
        "<minimax:tool_call>",
        '<parameter name="',
        "<seed:tool_call>",
        "<start_function_call>",
        "<escape>",
    ),
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<function_calls>",
        "<|tool_call_start|>",
        "<|START_ACTION|>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        "<｜tool_calls_begin｜>",
    ),
    *("<|open|>tools<|sep|>", '<|open|>call tool="', "<|sep|>", "]<]minimax[>[", "<tools_prefix|>", "<![CDATA[", "]]>"),
    *('<steptml:invoke name="', '<steptml:parameter name="', "<|tool_call>", '<|"|>'),
)
RANDOM_MARKUP = st.lists(st.sampled_from(MARKUP), max_size=30).map("".join)


def read(form: str, pieces: Iterable[str]) -> list[Event]:
    parser = tool_format(form).parser(TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events([*events, *parser.finish()])


def content(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def arguments(events: Iterable[Event]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCall):
            assert event.index == len(texts), "calls are numbered 0, 1, ..."
            texts[event.index] = ""
        elif isinstance(event, Arguments):
            texts[event.index] += event.text
    return texts


def test_every_format_has_examples() -> None:
    assert {each.format for each in EXAMPLES} == set(TOOL_FORMATS)


@ALL
def test_whole_outputs(example: Example) -> None:
    assert read(example.format, [example.text]) == list(example.events)


@ALL
def test_outputs_in_two_pieces(example: Example) -> None:
    text, whole = example.text, list(example.events)
    assert read(example.format, text) == whole
    for at in range(len(text) + 1):
        assert read(example.format, [text[:at], text[at:]]) == whole, at


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EXAMPLES), st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_outputs_in_random_pieces(example: Example, lengths: list[int]) -> None:
    pieces, at = [], 0
    while at < len(example.text):
        pieces.append(example.text[at : at + lengths[len(pieces) % len(lengths)]])
        at += len(pieces[-1])
    assert read(example.format, pieces) == list(example.events)


@ALL
def test_truncated_outputs(example: Example) -> None:
    whole_content, whole_arguments = content(example.events), arguments(example.events)
    names = [event for event in example.events if isinstance(event, ToolCall)]
    for at in range(len(example.text)):
        start = example.text[:at]
        events = read(example.format, start)
        emitted = content(events)
        if example.format not in TAGGED_CONTENT and not arguments(events):
            assert emitted == start
        shared = next(n for n in range(len(emitted), -1, -1) if whole_content.startswith(emitted[:n]))
        assert start.endswith(emitted[shared:]), "only undecided text may become content"
        assert [event for event in events if isinstance(event, ToolCall)] == names[: len(arguments(events))]
        for index, text in arguments(events).items():
            assert whole_arguments[index].startswith(text), at


@ALL
def test_calls_are_streamed(example: Example) -> None:
    """Calls are emitted before the end of the output."""
    parser = tool_format(example.format).parser(TOOLS)
    events: list[Event] = []
    for character in example.text:
        events += parser.feed(character)
    last_events = parser.finish()
    assert not any(isinstance(event, ToolCall) for event in last_events)
    assert merge_events([*events, *last_events]) == list(example.events)


@each_row("form", FORMATS)
def test_text_without_calls_is_content(form: str) -> None:
    for text in (
        "",
        " ",
        "\n\n",
        "Hello.",
        "  two  spaces\n",
        "a < b > c [x] {y} (z)",
        "naïve 🗼 日本語\n",
        "\t{1: 2}",
    ):
        assert read(form, text) == merge_events([Content(text)])


@settings(max_examples=400, deadline=None)
@given(NAMES, RANDOM_MARKUP, st.integers(1, 7))
def test_random_markup(form: str, text: str, step: int) -> None:
    whole = read(form, [text])
    assert read(form, [text[at : at + step] for at in range(0, len(text), step)]) == whole
    if form not in TAGGED_CONTENT and not arguments(whole):
        assert content(whole) == text
    arguments(whole)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.text(st.characters(blacklist_characters="<[{f", blacklist_categories=("Cs",))))
def test_random_text_without_markup_is_content(form: str, text: str) -> None:
    assert read(form, [text]) == merge_events([Content(text)])


def test_arguments_are_json() -> None:
    for example in EXAMPLES:
        if "oops" in example.text or "sorry" in example.text:
            continue
        for text in arguments(example.events).values():
            if text.endswith("}"):
                assert isinstance(json.loads(text), dict), text


@pytest.mark.parametrize("length", [256, 257])
def test_names_of_parameters_are_bounded(length: int) -> None:
    key = "k" * length
    text = f"<tool_call><function=f><parameter={key}>1</parameter></function></tool_call>"
    assert arguments(read("qwen3_coder", text)) == {0: f'{{"{key}": "1"}}' if length == 256 else ""}
